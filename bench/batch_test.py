"""What measuring a batch costs, how accurate it is, and what the rules for a batch give on real text.

overhead: a round of 20 updates with and without measuring, one worker on one rank and four on two, in time and
bytes. accuracy: sketched against full statistics of the same chunks of real gradients. text: the rules side by side
at the same number of tokens.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.sketch import BUCKETS, Sketch
from adloco_dist.noise.statistics import GradientStatistics, num_chunks
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.pool.estimator import GradientEstimator
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.inner import InnerPhase
from adloco_dist.run.journal import Journal
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import train
from common import interleave, parse, report, save
from helpers.gradients import per_sequence_gradients
from helpers.processes import run_ranks
from helpers.records import KeptRecords

UPDATES = 20
# Given in total batches of two workers. Constant 16 and the slow ramp take about as many rounds as the norm test, so
# that all three differ in when the sequences are spent, not in how many updates or bytes they get.
RULES: dict[str, tuple[str, ...]] = {
    "constant 8": ("batching.request=none",),
    "constant 16": ("batching.request=none", "batching.local_batch=8", f"inner.lr={3e-4 * 2**0.5}"),
    "constant 64": ("batching.request=none", "batching.local_batch=32", f"inner.lr={3e-4 * 8**0.5}"),
    "ramp 1.15": ("batching.request=ramp", "batching.ramp_factor=1.15"),
    "ramp 1.022": ("batching.request=ramp", "batching.ramp_factor=1.022"),
    "staged 8, 24, 64": (
        "batching.request=staged", "batching.stages=[[0,8],[0.3,24],[0.6,64]]",
    ),
    "norm test, unbiased": ("batching.request=norm_test",),
    "norm test, plug-in": ("batching.request=norm_test", "batching.gradient_norm=plugin"),
    "augmented test": ("batching.request=augmented_inner_product_test",),
}  # fmt: skip


def new_pool(settings: Settings, runtime: Runtime) -> tuple[LocalPool, PlanInputs]:
    """One rank's share of the pool on the built-in corpus."""
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    layout = experiment_layout(settings, runtime.nodes)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    pool = set_up_pool(settings, runtime, splits, objective, module, layout)
    return pool, find_plan_inputs(pool, layout, Trajectory())


# --- overhead


@dataclass(frozen=True)
class Cost:
    """Of measuring gradients in one setting, on rank 0 between barriers."""

    extra_seconds: list[float]
    """What the first update of a round takes more than without it, its exchange included, pair by pair."""
    bytes_per_worker: float


def measure_costs(runtime: Runtime, model: str, batch: int, workers: int, pairs: int) -> Any:
    """Seconds of whole rounds without measuring, and what measuring costs."""
    settings = compose(
        [f"model={model}", "algorithm=diloco", "batching.request=norm_test",
         "pool.trainers=1", f"pool.workers_per_trainer={workers}",
         f"algorithm.updates_per_round={UPDATES}", f"batching.local_batch={batch}", "inner.schedule=constant"]
    )  # fmt: skip
    pool, inputs = new_pool(settings, runtime)
    layout, trainer = inputs.layout, pool.trainers[0]
    group = pool.groups.of(layout.ranks(0))
    plan = plan_round(settings, inputs, None, PoolReport())
    first_update, numbers = replace(plan, updates=1), iter(range(1 << 30))
    estimator, bytes_sent = GradientEstimator(), [0]

    def measured() -> None:
        pool.flat_model.sketch.renew(next(numbers))
        InnerPhase(first_update, settings, estimator).run([trainer], pool.slots)
        bytes_sent[0] = sum(map(len, estimator.take(trainer).values()))

    def without() -> None:
        InnerPhase(first_update, settings).run([trainer], pool.slots)

    seconds = interleave([_together(measured), _together(without)], pairs, warmup=1)
    extra = [mine - other for mine, other in zip(*seconds, strict=True)]
    most_sent = max(message["sent"] for message in runtime.control.exchange({"sent": bytes_sent[0]}))

    def whole_round() -> None:
        InnerPhase(plan, settings).run([trainer], pool.slots)
        trainer.step(0, group)

    (rounds,) = interleave([_together(whole_round)], max(1, pairs // 8), warmup=0)
    return rounds, Cost(extra, most_sent / len(trainer.workers))


def _together(side: Callable[[], None]) -> Callable[[], None]:
    """A turn ends on all ranks at once, so the next begins on all at once too."""

    def turn() -> None:
        side()
        dist.barrier()

    return turn


def overhead(quick: bool) -> tuple[list[list[str]], dict[str, float]]:
    """The figures are the worst of one and four workers at the smallest batch, where measuring costs most."""
    rows, figures = [], {"sketch_overhead_tiny": 0.0, "sketch_overhead_10m": 0.0, "sketch_bytes": 0.0}
    cases = [("tiny", 4, 60), ("small", 4, 16)] if quick else [("tiny", 4, 120), ("tiny", 16, 40), ("small", 4, 24)]
    for model, batch, pairs in cases:
        for workers, nodes in ((1, [0]), (4, [0, 0])):
            pairs_taken = pairs // (4 if quick else workers)
            rounds, cost = run_ranks(measure_costs, nodes, model, batch, workers, pairs_taken)[0]
            whole = statistics.median(rounds)
            shares = [extra / whole for extra in cost.extra_seconds]
            quartiles = [f"{100 * value:.2f}" for value in statistics.quantiles(shares, n=4)]
            extra_ms = f"{1e3 * statistics.median(cost.extra_seconds):,.1f}"
            sent = f"{cost.bytes_per_worker / 1e3:,.1f}"
            rows.append([f"{model}, batch {batch}, {workers} worker(s)", f"{whole:.2f}", extra_ms, *quartiles, sent])
            figure = "sketch_overhead_tiny" if model == "tiny" else "sketch_overhead_10m"
            figures[figure] = max(figures[figure], statistics.median(shares))
            figures["sketch_bytes"] = max(figures["sketch_bytes"], cost.bytes_per_worker)
    return rows, figures


# --- accuracy


def accuracy_of_sketches(runtime: Runtime, updates: int, draws: int) -> Any:
    """Statistics of the same chunks from full vectors and from sketches, at the start and after some training.

    Returns:
        For each case: its name, noise scale, batch, and the errors of trace and squared norm in units of trace and
        |gbar|^2.
    """
    settings = compose(["model=tiny", "algorithm=diloco", "batching.request=norm_test",
                        "pool.trainers=1", "pool.workers_per_trainer=1",
                        f"algorithm.updates_per_round={updates}", "inner.schedule=constant",
                        "batching.local_batch=8"])  # fmt: skip
    pool, inputs = new_pool(settings, runtime)
    trainer = pool.trainers[0]
    plan = plan_round(settings, inputs, None, PoolReport())
    cases = []
    for name in ("start", f"after {updates} updates"):
        if cases:
            InnerPhase(plan, settings).run([trainer], pool.slots)
        cases += [(f"{name}: {batch}", *errors) for batch, errors in _errors(pool, draws)]
    return cases


def _errors(pool: LocalPool, draws: int) -> list[tuple[str, Any]]:
    trainer = pool.trainers[0]
    pool.flat_model.point_at(trainer.workers[0].weights)
    batch = cast(TokenBatch, trainer.cursor.batch(0, 0, 128, (1,)))
    sample, _ = per_sequence_gradients(pool.flat_model, pool.objective, batch)
    exact = _statistics(sample, torch.ones(len(sample)), None)
    noise_scale = exact.noise_scale
    found = []
    for label, batch in (("8 sequences", 8), ("a tenth of the noise scale", max(2, round(noise_scale / 10)))):
        chunks, sizes = _chunks(sample[:batch])
        full = _statistics(chunks, sizes, None)
        sketch = Sketch(pool.flat_model.num_elements, sample.dtype, sample.device)
        trace_errors, norm_errors = [], []
        for key in range(draws):
            sketch.renew(key)
            sketched = _statistics(torch.stack([sketch(chunk) for chunk in chunks]), sizes, BUCKETS)
            trace_errors.append((sketched.trace - full.trace) / full.trace)
            norm_errors.append((sketched.squared_norm - full.squared_norm) / full.mean_squared_norm)
        errors = [float(np.sqrt(np.mean(np.square(errors)))) for errors in (trace_errors, norm_errors)]
        found.append((label, (noise_scale, batch, *errors)))
    return found


def _chunks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = rows.tensor_split(num_chunks(len(rows)))
    return torch.stack([part.mean(0) for part in parts]), torch.tensor([float(len(part)) for part in parts])


def _statistics(rows: torch.Tensor, sizes: torch.Tensor, sketch_size: int | None) -> GradientStatistics:
    wide = rows.double()
    return statistics_from_gram(wide @ wide.T, sizes, sketch_size=sketch_size)


# --- text


def train_with(runtime: Runtime, rule: str, tokens: int, seed: int) -> dict[str, Any] | None:
    """One trainer with two workers, one on each rank."""
    settings = compose(
        ["model=nano", "algorithm=diloco", "pool.trainers=1", "pool.workers_per_trainer=2",
         "inner.warmup_fraction=0.05", f"budget={tokens}tokens", f"seed={seed}", "evaluation.every=null", *RULES[rule]]
    )  # fmt: skip
    pool, inputs = new_pool(settings, runtime)
    records = KeptRecords([])
    start = time.perf_counter()
    outcome = train(pool, inputs, Journal([records] if runtime.rank == 0 else []), StopRequest())
    rows = [row for row in records.records if row["round"]]
    if not rows:
        return None
    assert outcome.result
    return {
        "loss": outcome.result["candidates"][0]["validation_loss"],
        "tokens": rows[-1]["pool_tokens"],
        "updates": sum(row["updates"] for row in rows),
        "rounds": len(rows),
        "last_batch": rows[-1]["total_batch"],
        "bytes": sum(sum(row["bytes_sent"].values()) for row in rows),
        "seconds": time.perf_counter() - start,
    }


def text(tokens: int, seeds: int) -> list[list[str]]:
    runs: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    for seed in range(seeds):
        for rule in RULES:
            done = run_ranks(train_with, [0, 0], rule, tokens, seed)[0]
            assert done is not None
            runs[rule].append(done)
    rows = []
    for rule, found in runs.items():
        losses = [run["loss"] for run in found]
        middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
        rows.append(
            [rule, f"{min(losses):.3f}", f"{middle['loss']:.3f}", f"{max(losses):.3f}", f"{middle['tokens'] / 1e6:.2f}",
             f"{middle['updates']:,.0f}", f"{middle['rounds']:,.0f}",
             f"{middle['last_batch']:,.0f}", f"{middle['bytes'] / 1e6:,.1f}", f"{middle['seconds']:.1f}"],
        )  # fmt: skip
    return rows


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=["overhead", "accuracy", "text"], help="one of the three parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    if options.only in (None, "overhead"):
        rows, found = overhead(options.quick)
        figures |= found
        columns = ["", "round s", "extra ms", "% of a round: quartile", "median", "quartile", "kB sent per worker"]
        report(
            f"measuring the gradients once in {UPDATES} updates, sequences of 128 tokens", columns, rows, found, None
        )
    if options.only in (None, "accuracy"):
        cases = run_ranks(accuracy_of_sketches, [0], 60 if options.quick else 300, 20 if options.quick else 100)[0]
        found = {"sketch_trace_error": max(case[3] for case in cases), "sketch_norm_error": max(c[4] for c in cases)}
        figures |= found
        rows = [[name, f"{scale:,.1f}", str(batch), f"{trace:.2%}", f"{norm:.2%}"]
                for name, scale, batch, trace, norm in cases]  # fmt: skip
        columns = ["tiny, root mean square over random signs", "noise scale", "batch", "tr(Sigma)", "|G|^2"]
        report("error of sketched statistics, r = 4093", columns, rows, found, None)
    if options.only in (None, "text"):
        tokens, seeds = (300_000, 1) if options.quick else (3_000_000, 3)
        columns = ["rule", "loss: min", "median", "max", "tokens, M", "updates", "rounds", "last batch", "MB sent",
                   "seconds"]  # fmt: skip
        report(f"nano, two workers, {tokens / 1e6:.1f}M tokens of Python sources, {seeds} seed(s)", columns,
               text(tokens, seeds), {}, None)  # fmt: skip
    if options.json:
        save(figures, options.json)


if __name__ == "__main__":
    main()
