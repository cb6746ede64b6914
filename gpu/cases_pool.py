"""A pool on one device: instances at once or swapping, ranks that share it, checkpoints, equal runs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.cuda._sanitizer import enable_cuda_sanitizer
from torch.profiler import ProfilerActivity, profile

from adloco_dist.checkpoint.resume import fresh_domains
from adloco_dist.checkpoint.writer import CheckpointWriter, parts
from adloco_dist.config import Device
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import CheckpointId, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.offload import Offload
from adloco_dist.round.inner import InnerPhase
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from harness import Case, Here, SkippedError
from helpers.lone import lone_rank
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS, corpus_and_model, small_settings, train_small_pool
from ranks import MANY, cluster, collectives, largest_difference, probed_capacity, train_with
from subjects import is_on_gpu, new_bench, sized

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Of cuBLAS, for what is compared to the bit."""


def streams_as_in_turn(here: Here) -> dict[str, float]:
    """In fp64, with slots that are slow at other times."""
    concurrent = "streams" if here.is_cuda else "threads"
    in_turn = _train(here, *MANY)
    difference = largest_difference(in_turn, _train(here, *MANY, f"instances.concurrency={concurrent}"))
    assert difference < 1e-9, f"anchors differ by {difference:.3g}"
    return {"anchor_difference": difference}


def streams_under_the_sanitizer(here: Here) -> dict[str, float]:
    """The same, with torch's sanitizer, which also finds races that hurt nothing this time."""
    if here.is_cuda:
        enable_cuda_sanitizer()
    return streams_as_in_turn(here)


def swapping_as_staying(here: Here) -> dict[str, float]:
    """To the bit, with 1, 2 and 3 instances on the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    staying = _train(here, *MANY)
    differences = {
        f"difference_{resident}_resident": largest_difference(
            staying, _train(here, *MANY, f"instances.resident={resident}")
        )
        for resident in (1, 2, 3)
    }
    assert not any(differences.values()), f"anchors differ: {differences}"
    return differences


def _train(here: Here, *overrides: str) -> list[dict[str, Any]]:
    """The small pool on one rank, in this process."""
    with lone_rank(Device[here.device.type]) as runtime:
        return [train_with(runtime, slow_slots=True, overrides=list(overrides))]


def copies_overlap(here: Here) -> dict[str, float]:
    """Instances are copied in and out while another one computes."""
    size = [f"data.sequence_length={sized(here, 512, 16)}"]
    if here.is_cuda:
        size += ["model.overrides.hidden_size=1024", "model.overrides.intermediate_size=4096"]
    bench = new_bench(here.device, "precision=bf16", *size, workers=4)
    offload = Offload(here.device, resident=2)
    offload.settle(bench.trainer.workers)
    phase = InnerPhase(bench.plan(batch=sized(here, 16, 2), updates=4), bench.settings)
    phase.run([bench.trainer], [bench.slot], offload)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.is_cuda else [])]
    with profile(activities=activities) as profiled:
        phase.run([bench.trainer], [bench.slot], offload)
    if not here.is_cuda:
        raise SkippedError("a CPU has no copies beside its work")
    on_device = [event for event in profiled.events() or () if is_on_gpu(event)]
    copies, kernels = list[tuple[float, float]](), list[tuple[float, float]]()
    for event in on_device:
        is_copy = "memcpy" in event.name.lower() and "dtod" not in event.name.lower()
        (copies if is_copy else kernels).append((event.time_range.start, event.time_range.end))
    copied = sum(end - start for start, end in _union(copies))
    hidden = copied + sum(end - start for start, end in _union(kernels))
    hidden -= sum(end - start for start, end in _union([*copies, *kernels]))
    assert copied > 0, "nothing was copied"
    assert hidden > 0, f"none of {copied / 1e3:.1f} ms of copies had a kernel beside it"
    return {"copies_ms": copied / 1e3, "hidden_share": hidden / copied}


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans, ascending, with those joined that overlap."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def checkpoint_as_of_its_moment(here: Here) -> dict[str, float]:
    """Its files hold what the tensors were when it began, though all change at once; twice, in the same room."""
    settings = small_settings(*FOUR_TRAINERS, "pool.trainers=2", "pool.workers_per_trainer=2", "precision=fp32")
    num_bytes = 0
    with lone_rank(Device[here.device.type]) as runtime, fresh_domains(runtime, here.folder, settings) as domains:
        layout = experiment_layout(settings, runtime.nodes)
        pool = set_up_pool(settings, runtime, *corpus_and_model(settings), layout)
        plan = plan_round(settings, find_plan_inputs(pool, layout, Trajectory()), None, PoolReport())
        writer = CheckpointWriter(domains, runtime.store, 1, settings.checkpoint, print)
        for number in (1, 2):
            mark, state = CheckpointId(number, number), parts(pool, plan.layout, is_away=True)
            expected = {file: {name: one.cpu().clone() for name, one in some.items()} for file, some in state.items()}
            writer.begin(mark, state, {})
            for some in state.values():
                for tensor in some.values():
                    tensor.logical_not_() if tensor.dtype is torch.bool else tensor.add_(1)
            writer.wait()
            for file, tensors in expected.items():
                written = load_file(domains.folder / mark.name / file)
                assert written.keys() == tensors.keys()
                for name, tensor in tensors.items():
                    assert torch.equal(written[name], tensor), f"checkpoint {number}, {file}: {name} is another"
                    num_bytes += tensor.nbytes
    return {"bytes_compared": float(num_bytes)}


def resumed_as_never_stopped(here: Here) -> dict[str, float]:
    """To the bit, stopped in the middle of a round, after merges."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    ended = []
    for name, looks in (("whole", None), ("stopped", 25), ("stopped", None)):
        with lone_rank(Device[here.device.type]) as runtime:
            more = [*MANY, "checkpoint.every=null"]
            ended.append(train_kept(runtime, str(here.folder / name), looks, *FOUR_TRAINERS, *more))
    assert 0 < ended[1]["round"] < ended[0]["round"], f"stopped in round {ended[1]['round']}"
    whole, resumed = ended[0]["anchors"], ended[2]["anchors"]
    assert whole.keys() == resumed.keys()
    difference = max(float(abs(anchor - resumed[trainer]).max()) for trainer, anchor in whole.items())
    assert difference == 0, f"anchors differ by {difference:.3g}"
    return {"anchor_difference": difference, "stopped_in_round": float(ended[1]["round"])}


def collectives_between_ranks(here: Here) -> dict[str, float]:
    """Every collective over gloo, on tensors of a device that two ranks share, against the CPU."""
    results = run_ranks(collectives, [0, 0], cluster=cluster(here))
    expected = run_ranks(collectives, [0, 0])
    for rank, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, array in theirs.items():
            assert np.array_equal(mine[name], array), f"rank {rank}, {name}: another result"
    return {"collectives": float(len(results[0]))}


def two_ranks_on_one_device(here: Here) -> dict[str, float]:
    """A run with merges, in fp64: as on two ranks that compute on the CPU."""
    results = run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *MANY, cluster=cluster(here))
    difference = largest_difference(results, run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *MANY))
    assert difference < 1e-9, f"anchors differ by {difference:.3g}"
    return {"anchor_difference": difference}


def capacity_is_the_same_at_every_start(here: Here) -> dict[str, float]:
    """Three starts of two ranks that share a device, which has room for fewer sequences than they may ask for."""
    model, length, maximum, more = ("nano", 32, 64, ["cluster.memory_bytes=150000000"])
    if here.is_cuda:
        model, length, maximum, more = ("microllama", 1024, 512, ["model.overrides.num_hidden_layers=4"])
    found = [run_ranks(probed_capacity, [0, 0], model, length, maximum, more, cluster=cluster(here)) for _ in range(3)]
    for one, other in pairwise(found):
        assert one == other, f"capacities by start and rank: {found}"
    assert all(found[0]), f"there is memory for {maximum} sequences: nothing was found out"
    return {f"capacity_rank{rank}": float(capacity or 0) for rank, capacity in enumerate(found[0])}


def equal_runs(here: Here) -> dict[str, float]:
    """Two equal inner phases in bf16: elements that differ, as it is (no check), and with deterministic kernels."""
    figures = {}
    for name, is_deterministic in (("as_is", False), ("deterministic", True)):
        set_up_arithmetic(small_settings(f"deterministic={str(is_deterministic).lower()}"), here.device)
        ended = []
        for _ in range(2):
            bench = new_bench(here.device, "precision=bf16", workers=2)
            bench.run(batch=sized(here, 16, 4), updates=sized(here, 8, 2))
            ended.append([worker.weights.cpu().clone() for worker in bench.trainer.workers])
        differing = sum(int((one != other).sum()) for one, other in zip(*ended, strict=True))
        figures[f"differing_elements_{name}"] = float(differing)
    assert not figures["differing_elements_deterministic"], f"{figures}"
    return figures


CASES = [
    Case("streams as in turn", streams_as_in_turn),
    Case("streams, under the CUDA sanitizer", streams_under_the_sanitizer, 90),
    Case("swapping as staying, to the bit", swapping_as_staying, 90, DETERMINISTIC),
    Case("copies overlap with updates", copies_overlap, alone=True),
    Case("checkpoint as of its moment", checkpoint_as_of_its_moment),
    Case("resumed as never stopped, to the bit", resumed_as_never_stopped, 60, DETERMINISTIC),
    Case("collectives of two ranks", collectives_between_ranks, 90),
    Case("two ranks on one device", two_ranks_on_one_device, 90),
    Case("capacity is the same at every start", capacity_is_the_same_at_every_start, 120, alone=True),
    Case("two equal runs, to the bit", equal_runs, 60, DETERMINISTIC),
]
