"""Several model instances on one rank: tokens per second at the same total batch, in turn and at once.

One instance that takes the whole batch is compared with 2 and 4 that share it; all sides in turn within one run. Runs
on a GPU where there is one; memory is what tensors take there at most, beside what the sides before keep, and the
process' resident memory on a CPU.
"""

from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from adloco_dist.cluster.devices import wait_for
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Device
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.round.inner import InnerPhase
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from common import interleave, median_ratio, parse, report, spread
from helpers.lone import lone_rank

UPDATES = 5


def new_side(
    runtime: Runtime, model: str, instances: int, batch: int, length: int, concurrent: bool
) -> Callable[[], None]:
    """Five updates of every instance, which together take `batch` sequences per update."""
    ways = ("streams" if runtime.device.type == "cuda" else "threads") if concurrent else "serial"
    settings = compose(
        [f"model={model}", "algorithm=diloco", f"pool.trainers={instances}", "pool.workers_per_trainer=1",
         f"batching.local_batch={batch // instances}", f"data.sequence_length={length}",
         f"algorithm.updates_per_round={UPDATES}", "batching.request=none", f"instances.concurrency={ways}",
         "batching.capacity=1024", "inner.schedule=constant"]
    )  # fmt: skip
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    layout = Layout.one_rank_per_worker({trainer: (0,) for trainer in range(instances)})
    pool = set_up_pool(settings, runtime, splits, objective, module, layout)
    plan = plan_round(settings, find_plan_inputs(pool, layout, Trajectory()), None, PoolReport())
    phase = InnerPhase(replace(plan, updates=UPDATES), settings)

    def side() -> None:
        phase.run(list(pool.trainers.values()), pool.slots, pool.offload)
        wait_for(runtime.device)

    return side


def peak_bytes(device: torch.device) -> int:
    """The most that tensors took on a GPU since the peak was last reset; on a CPU, what the process takes now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def new_peak(device: torch.device) -> int:
    """Forget the peak so far; what is taken now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return peak_bytes(device)


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--model", default="tiny", help="a model group of conf/ (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per update of all instances (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence (%(default)s)")
    options = parser.parse_args()
    cases = [(1, False), (2, False), (2, True), (4, False), (4, True)]
    with lone_rank(Device.auto) as runtime:
        is_cuda = runtime.device.type == "cuda"
        sides, megabytes = [], []
        for instances, concurrent in cases:
            before = new_peak(runtime.device)
            side = new_side(runtime, options.model, instances, options.batch, options.length, concurrent)
            side()
            sides.append(side)
            megabytes.append((peak_bytes(runtime.device) - before) / 1e6)
        seconds = interleave(sides, 8 if options.quick else 24, warmup=1)
    tokens = UPDATES * options.batch * options.length
    rows, ratios = [], {}
    for (instances, concurrent), taken, memory in zip(cases, seconds, megabytes, strict=True):
        ratios[instances, concurrent] = median_ratio(seconds[0], taken)
        way = "" if instances == 1 else ", at once" if concurrent else ", in turn"
        speeds = spread([tokens / one for one in taken])
        rows.append([f"{instances} x{way}", *speeds, f"{ratios[instances, concurrent]:.3f}", f"{memory:,.0f}"])
    figures = {
        "instances_4_ratio": max(ratios[4, False], ratios[4, True]),
        "instances_4_in_turn": ratios[4, False],
        "instances_4_at_once": ratios[4, True],
    }
    where = "GPU" if is_cuda else f"{torch.get_num_threads()} threads"
    work = f"{options.batch} x {options.length} tokens per update in all"
    report(
        f"instances of {options.model} on one rank, {where}, {work}: tokens per second",
        ["instances", "min", "median", "max", "over one", "MB more"],
        rows,
        figures,
        options.json,
    )


if __name__ == "__main__":
    main()
