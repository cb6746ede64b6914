"""What ranks do together in the cases; importable, for ranks are processes of their own."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend, ClusterSettings, Device
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import RankReport
from adloco_dist.policy.summary import pool_report
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.regroup import regroup
from adloco_dist.round.steps import opening_report
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from flops import Work
from harness import Here
from helpers.support import FOUR_TRAINERS, train_small_pool

Array = npt.NDArray[np.floating[Any]]
MANY = (
    "pool.trainers=3", "pool.workers_per_trainer=2", "merge=worst_with_worst", "merge.every_rounds=2",
    "budget=5rounds", "batching.request=norm_test", "batching.eta=0.7", "inner.lr=5e-3",
)  # fmt: skip
"""Three trainers that merge twice, with batches that follow the gradients."""


def cluster(here: Here, backend: Backend = Backend.gloo) -> ClusterSettings:
    """Ranks that share the device of the case."""
    return ClusterSettings(device=Device[here.device.type], backend=backend, threads_per_rank=1, timeout_seconds=60)


def largest_difference(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Between the anchors of two runs with the same batches, by what `train_small_pool` returns on each rank."""
    batches = [[record.get("total_batch") for record in run[0]["records"]] for run in (mine, theirs)]
    assert batches[0] == batches[1], f"other batches: {batches[0]}, {batches[1]}"
    found = [anchors(run) for run in (mine, theirs)]
    assert found[0].keys() == found[1].keys()
    return max(float(abs(anchor - found[1][trainer]).max()) for trainer, anchor in found[0].items())


def anchors(run: list[dict[str, Any]]) -> dict[int, Any]:
    """By trainer, whichever ranks hold it in the end."""
    return {trainer: anchor for rank in run for trainer, anchor in rank["anchors"].items()}


def train_with(runtime: Runtime, slow_slots: bool, overrides: list[str]) -> dict[str, Any]:
    """Train the small pool; on a GPU, every lane's passes begin with a wait of another length.

    Args:
        slow_slots: so that streams which do not wait for each other where they should read what is not yet there.
    """

    def slow_down(pool: LocalPool) -> None:
        for number, slot in enumerate(pool.slots):
            cycles = 2_000_000 * (len(pool.slots) - number)
            if slow_slots and pool.runtime.device.type == "cuda":
                slot.flat_model.module.register_forward_pre_hook(lambda *_, cycles=cycles: torch.cuda._sleep(cycles))

    return train_small_pool(runtime, *FOUR_TRAINERS, *overrides, prepare=slow_down)


def collectives(runtime: Runtime) -> dict[str, Array]:
    """The result of every collective that the package uses, on tensors of the device, over all ranks."""
    group = Groups(runtime.backend, timeout_seconds=60).of(tuple(range(runtime.world_size)))
    assert group is not None
    rank, size, device = runtime.rank, runtime.world_size, runtime.device
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.float64):
        random = torch.Generator().manual_seed(rank)
        mine = torch.randn(100_003, generator=random, dtype=dtype).to(device)
        total = mine.clone()
        group.all_reduce(total)
        # Rank r sends r + 1 + s elements to rank s: of different lengths, as a merge does.
        others = [other for other in range(size) if other != rank]
        received = [(other, mine.new_empty(other + 1 + rank)) for other in others]
        group.send_and_receive([(other, mine[: rank + 1 + other]) for other in others], received)
        of_others = torch.zeros(size, 1000, dtype=dtype, device=device)
        group.exchange_tensors(mine[: 1000 * size].view(size, -1).unbind(), of_others.unbind())
        arrived, following, preceding = torch.empty_like(mine), (rank + 1) % size, (rank - 1) % size
        group.send_and_receive([(following, mine)], [(preceding, arrived)])
        name = str(dtype)
        found |= {
            f"all_reduce {name}": total,
            f"different lengths {name}": torch.cat([part for _, part in received]),
            f"exchange_tensors {name}": of_others,
            f"send_and_receive {name}": arrived,
        }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {name: tensor.numpy(force=True).copy() for name, tensor in found.items()}


def probed_capacity(runtime: Runtime, model: str, length: int, maximum: int, overrides: list[str]) -> int | None:
    """What this rank finds that fits into one pass, beside the others on its device; None: any batch up to `most`."""
    work = Work.of(model, length, maximum, "model.compile=false", f"pool.trainers={runtime.world_size}", *overrides)
    layout = experiment_layout(work.settings, runtime.nodes)
    return set_up_pool(work.settings, runtime, work.splits, work.objective, work.module, layout).capacity


def regrouped(runtime: Runtime, model: str, length: int) -> dict[str, float]:
    """Seconds of this rank for a merge of two trainers, one on each of two ranks: the decision, and what follows."""
    more = ("model.compile=false", "pool.trainers=2", "merge.policy=worst_with_worst", "merge.every_rounds=1")
    work = Work.of(model, length, 2, *more, "batching.capacity=1", "evaluation.every=null")
    layout = experiment_layout(work.settings, runtime.nodes)
    pool = set_up_pool(work.settings, runtime, work.splits, work.objective, work.module, layout)
    inputs = find_plan_inputs(pool, layout, Trajectory())
    first, own = plan_round(work.settings, inputs, None, PoolReport()), opening_report(pool, layout)
    start = time.perf_counter()
    reports = [decode(RankReport, message) for message in runtime.mail.gather(encode(own))]
    found = plan_round(work.settings, inputs, first, pool_report(reports, None, 0.0)) if reports else None
    plan = decode(RoundPlan, runtime.mail.broadcast(found and encode(found)))
    decided = time.perf_counter() - start
    assert plan.merge, "nothing merged"
    report = regroup(pool, layout, plan)
    return {"decision_s": decided, "regroup_s": report.seconds}
