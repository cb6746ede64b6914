"""How fast: model FLOPs utilisation, where the time of an update goes, and what everything between updates costs."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from adloco_dist.averaging.schedule import round_events
from adloco_dist.checkpoint.resume import fresh_domains
from adloco_dist.checkpoint.writer import CheckpointWriter, parts
from adloco_dist.cluster.devices import wait_for
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Device
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.passes import Passes, fit
from adloco_dist.policy.plan import CheckpointId, PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import RankReport
from adloco_dist.pool.capacity import probe_capacity
from adloco_dist.pool.muon import orthogonalized
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
from subjects import is_on_gpu, sized
from throughput import WAYS, Speeds, Way, measure_all

LENGTH = 1024
"""Tokens of a sequence."""
MOST_SHOWN = 5
"""Elementwise kernels that are named."""
UPDATES = 20
"""Of the round that a checkpoint is compared with."""
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "update": ("adam", "multi_tensor"),
    "cross_entropy": ("softmax", "nll_loss", "cross_entropy"),
    "matrices": ("gemm", "cutlass", "nvjet", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
}
"""What a kernel belongs to, by its name, the first that fits; all others are elementwise: norms, copies and so on."""


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


def where_time_goes(here: Here, is_compiled: bool = False) -> dict[str, float]:
    """Microseconds per token of an update's kernels, by kind; `idle` is when none ran.

    Prints the elementwise kernels that take longest.
    """
    work = new_work(here, f"model.compile={str(is_compiled and here.is_cuda).lower()}")
    trainer, slot = lone(here, work)
    batch, updates = sized(here, 16, 2), 3
    phase = phase_of(work, batch, updates)
    for _ in range(2):
        phase.run([trainer], [slot])
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.is_cuda else [])]
    with profile(activities=activities) as profiled:
        start = time.perf_counter()
        phase.run([trainer], [slot])
        wait_for(here.device)
        seconds = time.perf_counter() - start
    spent, elementwise = dict.fromkeys([*KINDS, "elementwise"], 0.0), defaultdict[str, float](float)
    for event in profiled.events() or ():
        if here.is_cuda:
            microseconds = event.time_range.elapsed_us() if is_on_gpu(event) else 0.0
        else:
            microseconds = event.self_cpu_time_total
        name = event.name.lower()
        kind = next((kind for kind, marks in KINDS.items() if any(mark in name for mark in marks)), "elementwise")
        spent[kind] += microseconds
        if kind == "elementwise":
            elementwise[event.name] += microseconds
    tokens = batch * updates * work.settings.data.sequence_length
    for name, microseconds in sorted(elementwise.items(), key=lambda item: -item[1])[:MOST_SHOWN]:
        print(f"{microseconds / tokens:.4f} us per token: {name}")
    assert spent["matrices"] > 0, "no kernel is known as a matrix multiplication"
    figures = {f"{kind}_us": microseconds / tokens for kind, microseconds in spent.items()}
    return figures | {"idle_us": (seconds * 1e6 - sum(spent.values())) / tokens}


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
            writer.begin(CheckpointId(number, number), parts(pool, plan, is_away=False), {})
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


def orthogonal_share(here: Here) -> dict[str, float]:
    """Muon's part of an update, and its matrices one by one instead of equal ones at once, in milliseconds."""
    work, batch = new_work(here, "inner=muon"), sized(here, 16, 2)
    trainer, slot = lone(here, work)
    (worker,), phase = trainer.workers, phase_of(work, batch, updates=sized(here, 5, 1))
    hidden = slot.flat_model.hidden_matrices.values()
    singly = [torch.randn(matrices.stack, device=here.device) for matrices in hidden]
    counts = Counter(matrices.stack for matrices in hidden)
    stacks = [torch.randn(count * stack[0], *stack[1:], device=here.device) for stack, count in counts.items()]

    def step() -> None:
        worker.step()
        wait_for(here.device)

    def one_by_one() -> None:
        for matrices in singly:
            orthogonalized(matrices, slot.flat_model.product_dtype)
        wait_for(here.device)

    compiled_step = torch.compile(orthogonalized, dynamic=False) if here.is_cuda else orthogonalized

    def at_once(function: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        for matrices in stacks:
            function(matrices, slot.flat_model.product_dtype)
        wait_for(here.device)

    (whole,) = interleave([partial(phase.run, [trainer], [slot])], rounds=3, warmup=1)
    sides = [step, one_by_one, partial(at_once, orthogonalized), partial(at_once, compiled_step)]
    names = ("muon_step_ms", "one_by_one_ms", "at_once_ms", "at_once_compiled_ms")
    taken = interleave(sides, rounds=5, warmup=2)
    figures = {name: 1e3 * statistics.median(one) for name, one in zip(names, taken, strict=True)}
    update = statistics.median(whole) / phase.plan.updates
    return {"orthogonal_share": figures["muon_step_ms"] / 1e3 / update, **figures}


def passes(here: Here) -> dict[str, float]:
    """Milliseconds of an update by its sequences, of one micro-batch, and the cost that a plan would fit to them."""
    work = new_work(here)
    trainer, slot = lone(here, work)
    seen = []
    for batch in [sized(here, batch, min(batch, 4)) for batch in (1, 2, 4, 8, 16, 32)]:
        phase = phase_of(work, batch, updates=4)
        (seconds,) = interleave([partial(phase.run, [trainer], [slot])], rounds=3, warmup=1)
        seen.append(Passes(1, batch, statistics.median(seconds) / phase.plan.updates))
    cost = fit(seen)
    assert cost
    worst = max(abs(cost.seconds(one.micro_batches, one.sequences) / one.seconds - 1) for one in seen)
    return {
        **{f"ms_of_{one.sequences}": 1e3 * one.seconds for one in seen},
        "micro_batch_ms": 1e3 * cost.micro_batch_seconds,
        "sequence_ms": 1e3 * cost.sequence_seconds,
        "worst_of_fit": worst,
    }


CASES = [
    Case("matrix rate", matrix_rate, alone=True),
    Case("throughput, 64 sequences, eager", partial(throughput, size=64), 120, alone=True),
    Case("where time goes, eager", where_time_goes, alone=True),
    Case("outer step", outer_step, alone=True),
    Case("checkpoint", checkpoint, 90, alone=True),
    Case("merge and regrouping", regrouping, 120, alone=True),
    Case("orthogonal share", orthogonal_share, 120, alone=True),
    Case("passes by their sequences", passes, alone=True),
    Case("capacity probe", capacity_probe, alone=True),
    Case("swapping", swapping, alone=True),
    Case("instances", instances, 120, alone=True),
    Case("throughput, 16 sequences, eager", partial(throughput, size=16), 120, alone=True),
    Case("throughput, 4 sequences, eager", partial(throughput, size=4), 120, alone=True),
    Case("throughput, b_max, eager", throughput, 120, alone=True),
    # A slow compiler is the reason why they come last.
    Case("throughput, 64 sequences, compiled", partial(throughput, size=64, is_compiled=True), 240, alone=True),
    Case("where time goes, compiled", partial(where_time_goes, is_compiled=True), 240, alone=True),
    Case("throughput, 16 sequences, compiled", partial(throughput, size=16, is_compiled=True), 240, alone=True),
]
