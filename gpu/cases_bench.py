"""How fast: model FLOPs utilisation, and what everything between updates costs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from adloco_dist.averaging.schedule import round_events
from adloco_dist.checkpoint.resume import fresh_domains
from adloco_dist.checkpoint.writer import CheckpointWriter, parts
from adloco_dist.cluster.devices import wait_for
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Device
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import CheckpointId, PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import RankReport
from adloco_dist.pool.capacity import probe_capacity
from adloco_dist.pool.offload import Offload
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.steps import begin_round
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import run_round
from common import interleave, median_ratio
from flops import Work, matrix_rates
from harness import Case, Here, SkippedError
from helpers.lone import lone_rank, lone_trainer
from helpers.processes import run_ranks
from ranks import cluster, regrouped
from subjects import sized
from throughput import WAYS, Speeds, Way, measure_all

LENGTH = 1024
"""Tokens of a sequence."""
UPDATES = 20
"""Of the round that a checkpoint is compared with."""


def new_work(here: Here, *overrides: str, maximum: int = 128) -> Work:
    """MicroLlama in bf16 on random ids; on a CPU the smallest model there is."""
    model, length = ("microllama", LENGTH) if here.is_cuda else ("nano", 16)
    return Work.of(model, length, sized(here, maximum, 4), "model.compile=false", *overrides)


def lone(here: Here, work: Work, workers: int = 1) -> tuple[Trainer, ComputeSlot]:
    """A trainer by itself, and its lane; the loss is fused or compiled as it is in a run on this device."""
    module = work.objective.build(here.device, in_bf16=True)
    return lone_trainer(work.settings, work.objective, module, work.table, range(workers), device=here.device)


def phase_of(work: Work, batch: int, updates: int) -> InnerPhase:
    """The inner phase of a round of so many updates."""
    settings = replace(work.settings, batching=replace(work.settings.batching, local_batch=batch))
    plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0])), None, PoolReport())
    return InnerPhase(replace(plan, updates=updates), settings)


def matrix_rate(here: Here) -> dict[str, float]:
    """What a share of is reported as MFU: torch.matmul of square bf16 matrices."""
    rates = [rate / 1e12 for rate in matrix_rates(here.device)]
    return {"matrix_tflops": statistics.median(rates), "least_tflops": min(rates), "most_tflops": max(rates)}


def throughput(here: Here, size: int | None = None, is_compiled: bool = False) -> dict[str, float]:
    """MFU of one instance, with nothing or everything compiled, against the matrix rate of the same process.

    Args:
        size: sequences per update; None: as many as fit into one pass.
    """
    is_compiled = is_compiled and here.is_cuda  # which takes minutes on a CPU
    work = new_work(here, f"model.compile={str(is_compiled).lower()}")
    sizes = [] if size is None else [sized(here, size, 2)]
    speeds, limits = _speeds(here, work, [WAYS["1"]], sizes, size is None, [is_compiled])
    rate = statistics.median(matrix_rates(here.device))
    figures = {f"b_max_{way.key}": float(count) for way, count in limits.items()} if size is None else {}
    ((side, taken),) = speeds.items()
    if not taken:
        raise SkippedError(f"{side.batch} sequences do not fit into one pass on this device")
    name = "mfu_1_compiled" if is_compiled else "mfu_1"
    figures[name] = statistics.median(taken) * work.flops_per_token / rate
    figures[name.replace("mfu", "tokens_per_second")] = statistics.median(taken)
    return figures | {"matrix_tflops": rate / 1e12}


def instances(here: Here) -> dict[str, float]:
    """Four instances, in turn and at once, over one with the same local batch: tokens per second of all together."""
    work, ways = new_work(here), [WAYS[key] for key in ("1", "4_in_turn", "4_at_once")]
    speeds, _ = _speeds(here, work, ways, [sized(here, 8, 1)], False, [False])
    one, *fours = (speeds[side] for side in speeds)
    names = ("instances_4_in_turn", "instances_4_at_once")
    return {name: median_ratio(taken, one) for name, taken in zip(names, fours, strict=True) if taken}


def _speeds(
    here: Here, work: Work, ways: Sequence[Way], sizes: Sequence[int], with_b_max: bool, compiling: Sequence[bool]
) -> tuple[Speeds, dict[Way, int]]:
    speeds, limits = Speeds(), dict[Way, int]()

    def report_line(of_size: Speeds, b_max: dict[Way, int]) -> None:
        speeds.update(of_size)
        limits.update(b_max)

    with lone_rank(Device[here.device.type]) as runtime:
        measure_all(work, runtime, ways, sizes, with_b_max, compiling, True, report_line)
    return speeds, limits


def outer_step(here: Here) -> dict[str, float]:
    """Milliseconds of the outer step of a trainer with two workers, its state on the device and on the CPU."""
    sides = {place: _outer_step(here, place) for place in ("device", "cpu")}
    seconds = interleave(list(sides.values()), rounds=5)
    return {f"outer_{place}_ms": 1e3 * statistics.median(taken) for place, taken in zip(sides, seconds, strict=True)}


def _outer_step(here: Here, place: str) -> Callable[[], None]:
    trainer, _ = lone(here, new_work(here, f"pool.outer_state={place}", maximum=4), workers=2)

    def step() -> None:
        trainer.step(0, None)
        wait_for(here.device)

    return step


def regrouping(here: Here) -> dict[str, float]:
    """Seconds of a merge of two trainers on two ranks that share the device, over gloo, and of its decision."""
    model, length = ("microllama", LENGTH) if here.is_cuda else ("nano", 16)
    taken = run_ranks(regrouped, [0, 0], model, length, cluster=cluster(here))
    return {name: max(rank[name] for rank in taken) for name in taken[0]}


def capacity_probe(here: Here) -> dict[str, float]:
    """Seconds until b_max is known, of one instance, eager."""
    work = new_work(here)
    trainer, slot = lone(here, work)
    start = time.perf_counter()
    capacity = probe_capacity([slot], [trainer], work.settings, work.maximum, sharers=1)
    wait_for(here.device)
    return {"probe_s": time.perf_counter() - start, "b_max": float(capacity or work.maximum)}


def checkpoint(here: Here) -> dict[str, float]:
    """How long training stands still for the copy, in % of a round of twenty updates, and the writing."""
    batch, updates = sized(here, 8, 1), sized(here, UPDATES, 2)
    work = new_work(here, f"batching.local_batch={batch}", maximum=8)
    with lone_rank(Device[here.device.type]) as runtime, fresh_domains(runtime, here.folder, work.settings) as domains:
        layout = experiment_layout(work.settings, runtime.nodes)
        pool = set_up_pool(work.settings, runtime, work.splits, work.objective, work.module, layout)
        plan = plan_round(work.settings, find_plan_inputs(pool, layout, Trajectory()), None, PoolReport())
        plan = replace(plan, updates=updates, events=round_events(updates))
        writer = CheckpointWriter(domains, runtime.store, 1, work.settings.checkpoint, print)
        rounds, copies, writing = list[float](), list[float](), list[float]()
        for number in range(1, 4):
            start = time.perf_counter()
            planned, report = replace(plan, round=number), RankReport(0)
            begin_round(pool, None, planned, report)
            assert run_round(pool, planned, report, StopRequest()) is None
            wait_for(here.device)
            rounds.append(time.perf_counter() - start)
            start = time.perf_counter()
            writer.begin(CheckpointId(number, number), parts(pool, plan.layout, is_away=False), {})
            copies.append(time.perf_counter() - start)
            writer.wait()
            writing.append(time.perf_counter() - start)
    return {
        "first_copy_ms": 1e3 * copies[0],  # its pinned memory is new
        "copy_ms": 1e3 * min(copies[1:]),
        "checkpoint_blocked_percent": 100 * min(copies[1:]) / min(rounds[1:]),
        "written_s": min(writing),
        "round_s": min(rounds[1:]),
    }


def swapping(here: Here) -> dict[str, float]:
    """Seconds of four instances of which two are on the device, over those of four that stay."""
    work = new_work(here, "pool.workers_per_trainer=4", maximum=8)
    trainer, slot = lone(here, work, workers=4)
    phase, staying = phase_of(work, sized(here, 8, 1), updates=sized(here, 10, 2)), Offload(here.device, None)
    medians = []
    for offload in (staying, Offload(here.device, 2)):
        offload.settle(trainer.workers)
        (seconds,) = interleave([partial(phase.run, [trainer], [slot], offload)], rounds=3, warmup=1)
        medians.append(statistics.median(seconds))
    return {"swapping_over_staying": medians[1] / medians[0], "staying_s": medians[0]}


CASES = [
    Case("matrix rate", matrix_rate, alone=True),
    Case("throughput, 32 sequences, eager", partial(throughput, size=32), 120, alone=True),
    Case("outer step", outer_step, alone=True),
    Case("checkpoint", checkpoint, 90, alone=True),
    Case("merge and regrouping", regrouping, 120, alone=True),
    Case("capacity probe", capacity_probe, alone=True),
    Case("swapping", swapping, alone=True),
    Case("instances", instances, 120, alone=True),
    Case("throughput, 16 sequences, eager", partial(throughput, size=16), 120, alone=True),
    Case("throughput, 4 sequences, eager", partial(throughput, size=4), 120, alone=True),
    Case("throughput, b_max, eager", throughput, 120, alone=True),
    # A slow compiler is the reason why they come last.
    Case("throughput, 32 sequences, compiled", partial(throughput, size=32, is_compiled=True), 240, alone=True),
    Case("throughput, 16 sequences, compiled", partial(throughput, size=16, is_compiled=True), 240, alone=True),
]
