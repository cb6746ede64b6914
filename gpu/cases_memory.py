"""Memory: what a device without enough of it does to an update, and whether what was probed holds."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from adloco_dist.averaging.schedule import round_events
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Device
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import RankReport
from adloco_dist.pool.capacity import free_device_memory
from adloco_dist.pool.slot import ComputeSlot, further_slot
from adloco_dist.round.steps import begin_round
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import run_round
from flops import Work
from harness import Case, Here
from helpers.lone import lone_rank
from subjects import Bench, new_bench, sized

EARLY, LATE = 0.2, 0.9
"""Where between the peaks of half a batch and of a whole one memory ends: in the forward pass, in the backward pass."""


def out_of_memory(here: Here, *overrides: str, num_slots: int = 1) -> dict[str, float]:
    """An update whose pass does not fit is repeated in smaller ones: the same gradient, and memory comes back."""
    batch, vocabulary = sized(here, 16, 4), sized(here, 32_000, 500)
    length = f"data.sequence_length={sized(here, 512, 16)}"
    bench = new_bench(here.device, "precision=fp32", length, *overrides, workers=num_slots, vocabulary=vocabulary)
    slots = [bench.slot, *(further_slot(bench.slot, bench.settings) for _ in range(num_slots - 1))]
    _update(bench, slots, batch)  # loads kernels, compiles
    expected = _update(bench, slots, batch)
    peak, peak_of_half = expected.peak_bytes, _update(bench, slots, batch // 2).peak_bytes
    before = _taken(here.device)
    figures = {"peak_mb": peak / 1e6, "peak_of_half_mb": peak_of_half / 1e6}
    for name, share in (("early", EARLY), ("late", LATE)):
        if here.is_cuda:
            assert peak > 1.5 * peak_of_half, f"peaks of {peak:,} and {peak_of_half:,} bytes say nothing"
            _limit(here.device, int(peak_of_half + share * (peak - peak_of_half)))
        else:
            bench.slot.flat_model.capacity = batch // 2
        update = _update(bench, slots, batch)
        if here.is_cuda:
            _limit(here.device, None)
            assert any("out of memory" in note for note in update.notes), f"{name}: it fitted"
        pairs = zip(update.gradients, expected.gradients, strict=True)
        errors = [float((one - other).norm() / other.norm()) for one, other in pairs]
        figures[f"{name}_error"], figures[f"{name}_notes"] = max(errors), float(len(update.notes))
        assert max(errors) < 1e-4, f"{name}: gradients differ by {max(errors):.3g} of their norm"
        for slot in slots:
            slot.flat_model.capacity = None
    figures["kept_mb"] = (_taken(here.device) - before) / 1e6
    assert figures["kept_mb"] < 1, f"{figures['kept_mb']:.1f} MB did not come back"
    return figures


@dataclass
class _Update:
    """One update of every worker, each on a lane of its own, from the anchor."""

    gradients: list[torch.Tensor]
    """By lane, on the CPU."""
    peak_bytes: int
    """The most that tensors took of a GPU meanwhile."""
    notes: list[str]


def _update(bench: Bench, slots: Sequence[ComputeSlot], batch: int) -> _Update:
    device = bench.slot.flat_model.device
    bench.restart()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    notes = bench.run(batch, updates=1, slots=slots if len(slots) > 1 else ()).notes
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return _Update([slot.flat_model.gradient.cpu().clone() for slot in slots], peak, notes)


def _limit(device: torch.device, num_bytes: int | None) -> None:
    """Let this process take so much of the device; None: all."""
    free_device_memory()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else num_bytes / total, device)


def _taken(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def probed_batch(here: Here, *overrides: str, instances: int = 1) -> dict[str, float]:
    """Three rounds at the b_max that was probed, with evaluation, run without a note of memory."""
    maximum, length = sized(here, 512, 4), sized(here, 1024, 16)
    shape = ["model.overrides.num_hidden_layers=4"] if here.is_cuda else []
    ours = [f"pool.workers_per_trainer={instances}", f"batching.max_batch={maximum * instances}", *shape]
    work = Work.of("microllama" if here.is_cuda else "nano", length, maximum, "model.compile=false", *ours, *overrides)
    settings, notes = work.settings, list[str]()
    with lone_rank(Device[here.device.type]) as runtime:
        layout = experiment_layout(settings, runtime.nodes)
        pool = set_up_pool(settings, runtime, work.splits, work.objective, work.module, layout)
        b_max = pool.capacity or maximum
        batching = replace(settings.batching, local_batch=b_max)
        pool.settings = replace(settings, batching=batching)
        plan = plan_round(pool.settings, find_plan_inputs(pool, layout, Trajectory()), None, PoolReport())
        assert plan.batches[0].local_batch == b_max
        for number in range(3):
            report = RankReport(0)
            planned = replace(plan, round=number, updates=2, events=round_events(2), evaluate=True)
            begin_round(pool, None, planned, report)
            assert run_round(pool, planned, report, StopRequest()) is None
            notes += report.trainers[0].inner.notes
        left = torch.cuda.mem_get_info(here.device)[0] / 1e9 if here.is_cuda else 0.0
    assert not notes, "; ".join(notes)
    return {"b_max": float(b_max), "free_gb": left}


def out_of_memory_compiled(here: Here) -> dict[str, float]:
    """As out_of_memory, in what was compiled."""
    return out_of_memory(here, f"model.compile={str(here.is_cuda).lower()}")


def out_of_memory_on_slots(here: Here) -> dict[str, float]:
    """As out_of_memory, on two streams, or threads, at once."""
    return out_of_memory(here, num_slots=2)


def probed_batch_compiled(here: Here) -> dict[str, float]:
    """As probed_batch, in what was compiled."""
    return probed_batch(here, f"model.compile={str(here.is_cuda).lower()}")


def probed_batch_at_once(here: Here) -> dict[str, float]:
    """As probed_batch, of two instances at once."""
    return probed_batch(here, f"instances.concurrency={'streams' if here.is_cuda else 'threads'}", instances=2)


def probed_batch_swapping(here: Here) -> dict[str, float]:
    """As probed_batch, of three instances, one of which is on the device at a time."""
    return probed_batch(here, "instances.resident=1", instances=3)


CASES = [
    Case("out of memory, eager", out_of_memory),
    Case("out of memory, compiled", out_of_memory_compiled, seconds=120),
    Case("out of memory, on several slots", out_of_memory_on_slots),
    Case("b_max holds, in turn", probed_batch, seconds=90, alone=True),
    Case("b_max holds, at once", probed_batch_at_once, seconds=90, alone=True),
    Case("b_max holds, swapping", probed_batch_swapping, seconds=90, alone=True),
    Case("b_max holds, compiled", probed_batch_compiled, seconds=180, alone=True),
]
