"""How fast: model FLOPs utilisation, where the time of an update goes, and what everything between updates costs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from common import interleave, median_ratio
from flops import Work, matrix_rates
from harness import Case, Here, SkippedError
from ranks import cluster, regrouped
from subjects import is_on_gpu, sized
from throughput import WAYS, Speeds, Way, measure_all
from torch.profiler import ProfilerActivity, profile

from adloco_dist.checkpointing import parts
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Device
from adloco_dist.decisions.checkpointing import Mark
from adloco_dist.decisions.layout import experiment_layout
from adloco_dist.decisions.plan import PoolReport, Premises
from adloco_dist.decisions.planning import plan_round
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.decisions.report import RankReport
from adloco_dist.hosting import find_premises, host
from adloco_dist.launch.resume import fresh_volumes
from adloco_dist.pool.lane import Lane
from adloco_dist.pool.residence import Residence
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.outer import outer
from adloco_dist.round.phases import wait_for
from adloco_dist.round.probe import probe_capacity
from adloco_dist.run.writer import CheckpointWriter
from adloco_dist.testing.lone import lone_rank, lone_trainer
from adloco_dist.testing.processes import run_ranks
from adloco_dist.train import run_round

LENGTH = 1024
"""Tokens of a sequence."""
UPDATES = 20
"""Of the round that a checkpoint is compared with."""
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "update": ("adam", "multi_tensor"),
    "cross_entropy": ("softmax", "nll_loss", "cross_entropy"),
    "matrices": ("gemm", "cutlass", "nvjet", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
}
"""What a kernel belongs to, by its name, the first that fits; all others are elementwise: norms, copies and so on."""


def new_work(here: Here, *overrides: str, most: int = 128) -> Work:
    """MicroLlama in bf16 on random ids; on a CPU the smallest model there is."""
    model, length = ("microllama", LENGTH) if here.is_cuda else ("nano", 16)
    return Work.of(model, length, sized(here, most, 4), "model.compile=false", *overrides)


def lone(here: Here, work: Work, workers: int = 1) -> tuple[Trainer, Lane]:
    """A trainer by itself, and its lane."""
    return lone_trainer(work.settings, work.module, work.store.num_sequences, range(workers), device=here.device)


def phase_of(work: Work, batch: int, updates: int) -> InnerPhase:
    """The inner phase of a round of so many updates."""
    settings = replace(work.settings, batching=replace(work.settings.batching, local_batch=batch))
    plan = plan_round(settings, Premises(experiment_layout(settings, [0])), None, PoolReport())
    return InnerPhase(replace(plan, updates=updates), settings, work.store)


def matrix_rate(here: Here) -> dict[str, float]:
    """What a share of is told as MFU: torch.matmul of square bf16 matrices."""
    rates = [rate / 1e12 for rate in matrix_rates(here.device)]
    return {"matrix_tflops": statistics.median(rates), "least_tflops": min(rates), "most_tflops": max(rates)}


def throughput(here: Here, sizes: Sequence[int], with_b_max: bool = False) -> dict[str, float]:
    """MFU of one instance, eager and compiled, against the matrix rate of the same process."""
    work = new_work(here, f"model.compile={str(here.is_cuda).lower()}")
    sizes = [sized(here, size, 2) for size in sizes]
    speeds, limits = _speeds(here, work, [WAYS["1"]], sizes, with_b_max, [False, True] if here.is_cuda else [False])
    rate = statistics.median(matrix_rates(here.device))
    figures = {f"b_max_{way.key}": float(count) for way, count in limits.items()} if with_b_max else {}
    for side, taken in speeds.items():
        if not taken:
            raise SkippedError(f"{side.batch} sequences do not fit into one pass on this device")
        name = "mfu_1_compiled" if side.is_compiled else "mfu_1"
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

    def tell(of_size: Speeds, b_max: dict[Way, int]) -> None:
        speeds.update(of_size)
        limits.update(b_max)

    with lone_rank(Device[here.device.type]) as runtime:
        measure_all(work, runtime, ways, sizes, with_b_max, compiling, True, tell)
    return speeds, limits


def where_time_goes(here: Here, is_compiled: bool = False) -> dict[str, float]:
    """Microseconds per token of an update's kernels, by kind; `idle` is when none ran."""
    work = new_work(here, f"model.compile={str(is_compiled and here.is_cuda).lower()}")
    trainer, lane = lone(here, work)
    batch, updates = sized(here, 16, 2), 3
    phase = phase_of(work, batch, updates)
    for _ in range(2):
        phase.run([trainer], [lane])
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.is_cuda else [])]
    with profile(activities=activities) as profiled:
        start = time.perf_counter()
        phase.run([trainer], [lane])
        wait_for(here.device)
        seconds = time.perf_counter() - start
    spent = dict.fromkeys([*KINDS, "elementwise"], 0.0)
    for event in profiled.events() or ():
        if here.is_cuda:
            microseconds = event.time_range.elapsed_us() if is_on_gpu(event) else 0.0
        else:
            microseconds = event.self_cpu_time_total
        name = event.name.lower()
        kind = next((kind for kind, marks in KINDS.items() if any(mark in name for mark in marks)), "elementwise")
        spent[kind] += microseconds
    tokens = batch * updates * work.settings.data.sequence_length
    assert spent["matrices"] > 0, "no kernel is known as a matrix multiplication"
    figures = {f"{kind}_us": microseconds / tokens for kind, microseconds in spent.items()}
    return figures | {"idle_us": (seconds * 1e6 - sum(spent.values())) / tokens}


def outer_step(here: Here) -> dict[str, float]:
    """Milliseconds of the outer step of a trainer with two workers, its state on the device and on the CPU."""
    sides = {place: _outer_step(here, place) for place in ("device", "cpu")}
    seconds = interleave(list(sides.values()), rounds=5)
    return {f"outer_{place}_ms": 1e3 * statistics.median(taken) for place, taken in zip(sides, seconds, strict=True)}


def _outer_step(here: Here, place: str) -> Callable[[], None]:
    trainer, _ = lone(here, new_work(here, f"pool.outer_state={place}", most=4), workers=2)

    def step() -> None:
        outer(trainer, None)
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
    trainer, lane = lone(here, work)
    start = time.perf_counter()
    capacity = probe_capacity([lane], [trainer], work.settings, work.most, sharers=1)
    wait_for(here.device)
    return {"probe_s": time.perf_counter() - start, "b_max": float(capacity or work.most)}


def checkpoint(here: Here) -> dict[str, float]:
    """How long training stands still for the copy, in % of a round of twenty updates, and the writing."""
    batch, updates = sized(here, 8, 1), sized(here, UPDATES, 2)
    work = new_work(here, f"batching.local_batch={batch}", most=8)
    with lone_rank(Device[here.device.type]) as runtime, fresh_volumes(runtime, here.folder, work.settings) as volumes:
        layout = experiment_layout(work.settings, runtime.nodes)
        rank = host(work.settings, runtime, work.splits, work.module, layout)
        plan = plan_round(work.settings, find_premises(rank, layout, Trajectory()), None, PoolReport())
        plan = replace(plan, updates=updates)
        writer = CheckpointWriter(volumes, runtime.store, 1, work.settings.checkpoint, print)
        rounds, copies, writing = list[float](), list[float](), list[float]()
        for number in range(1, 4):
            start = time.perf_counter()
            assert run_round(rank, replace(plan, round=number), RankReport(0), StopRequest())
            wait_for(here.device)
            rounds.append(time.perf_counter() - start)
            start = time.perf_counter()
            writer.begin(Mark(number, number), parts(rank, plan, is_midway=False), {})
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
    work = new_work(here, "pool.workers_per_trainer=4", most=8)
    trainer, lane = lone(here, work, workers=4)
    phase, staying = phase_of(work, sized(here, 8, 1), updates=sized(here, 10, 2)), Residence(here.device, None)
    medians = []
    for residence in (staying, Residence(here.device, 2)):
        residence.settle(trainer.workers)
        (seconds,) = interleave([partial(phase.run, [trainer], [lane], residence)], rounds=3, warmup=1)
        medians.append(statistics.median(seconds))
    return {"swapping_over_staying": medians[1] / medians[0], "staying_s": medians[0]}


CASES = [
    Case("matrix rate", matrix_rate),
    Case("throughput, 64 sequences", partial(throughput, sizes=[64]), 150),
    Case("where time goes, eager", where_time_goes),
    Case("outer step", outer_step),
    Case("throughput, 16 sequences", partial(throughput, sizes=[16]), 120),
    Case("checkpoint", checkpoint, 90),
    Case("merge and regrouping", regrouping, 120),
    Case("capacity probe", capacity_probe),
    Case("swapping", swapping),
    Case("instances", instances, 120),
    Case("throughput, b_max", partial(throughput, sizes=[], with_b_max=True), 150),
    Case("where time goes, compiled", partial(where_time_goes, is_compiled=True), 120),
    Case("throughput, 4 sequences", partial(throughput, sizes=[4]), 120),
]
