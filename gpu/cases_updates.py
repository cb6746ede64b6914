"""Where the time of an update goes: kinds of kernels, Muon's step, and what its passes cost by their sequences."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from adloco_dist.cluster.devices import wait_for
from adloco_dist.policy.passes import Passes, fit
from adloco_dist.pool.muon import orthogonalized
from cases_bench import lone, new_work, phase_of
from common import interleave
from harness import Case, Here
from subjects import is_on_gpu, sized

Orthogonalize = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
MOST_SHOWN = 5
"""Elementwise kernels that are named."""
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "update": ("adam", "multi_tensor"),
    "cross_entropy": ("softmax", "nll_loss", "cross_entropy"),
    "matrices": ("gemm", "cutlass", "nvjet", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
}
"""What a kernel belongs to, by its name, the first that fits; all others are elementwise: norms, copies and so on."""


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


def orthogonal_share(here: Here) -> dict[str, float]:
    """Muon's part of an update, and its matrices one by one instead of equal ones at once, in milliseconds."""
    work, batch = new_work(here, "inner=muon"), sized(here, 16, 2)
    trainer, slot = lone(here, work)
    (worker,), phase = trainer.workers, phase_of(work, batch, updates=sized(here, 5, 1))
    hidden = slot.flat_model.hidden_matrices.values()
    singly = [torch.randn(matrices.stack, device=here.device) for matrices in hidden]
    counts = Counter(matrices.stack for matrices in hidden)
    together = [torch.randn(count * stack[0], *stack[1:], device=here.device) for stack, count in counts.items()]

    def step() -> None:
        worker.step()
        wait_for(here.device)

    def orthogonalize(stacks: Sequence[torch.Tensor], function: Orthogonalize = orthogonalized) -> None:
        for matrices in stacks:
            function(matrices, slot.flat_model.product_dtype)
        wait_for(here.device)

    compiled = torch.compile(orthogonalized, dynamic=False) if here.is_cuda else orthogonalized
    (whole,) = interleave([partial(phase.run, [trainer], [slot])], rounds=3, warmup=1)
    alike = partial(orthogonalize, together)
    sides = [step, partial(orthogonalize, singly), alike, partial(alike, compiled)]
    names = ("muon_step_ms", "one_by_one_ms", "at_once_ms", "at_once_compiled_ms")
    taken = interleave(sides, rounds=5, warmup=2)
    figures = {name: 1e3 * statistics.median(one) for name, one in zip(names, taken, strict=True)}
    update_ms = 1e3 * statistics.median(whole) / phase.plan.updates
    return {
        "orthogonal_share": figures["at_once_ms"] / update_ms,
        "muon_step_share": figures["muon_step_ms"] / update_ms,
        **figures,
    }


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
    Case("where time goes, eager", where_time_goes, alone=True),
    Case("orthogonal share", orthogonal_share, 120, alone=True),
    Case("passes by their sequences", passes, alone=True),
    Case("where time goes, compiled", partial(where_time_goes, is_compiled=True), 240, alone=True),
]
