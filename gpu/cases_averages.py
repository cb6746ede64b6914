"""Averages between ranks that share a GPU, over gloo: every format, beside updates; what they keep.

Those of sharded workers need NCCL: cases_nccl.py runs them.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adloco_dist import DiLoCo, Wire
from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.inside_first import InsideFirst
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import ClusterSettings
from harness import Case, Here, SkippedError
from helpers.plain import Tied, adamw, batch, update
from helpers.processes import run_ranks
from helpers.sharded import run_whole
from ranks import cluster

FORMATS: dict[str, Averager] = {
    "fp32": FullPrecision(),
    "bf16": Quantized(BFloat16()),
    "int8": Quantized(WholeNumbers(8)),
    "int4": Quantized(WholeNumbers(4), keeps_residual=True),
    "sparse": Sparse(),
}
NODES = (0, 0, 1, 1)
LENGTH = 100_003
AVERAGES, FIRST = 100, 10
"""Averages beside updates, and those after which all memory that they keep must be there."""
UPDATES = 4
DELAYED = ("pool.trainers=1", "pool.workers_per_trainer=2", "wire.delay_updates=1", "wire=int8")


def every_format(here: Here) -> dict[str, float]:
    """Sums of four ranks in every format, and inside of nodes first: the bits of CPUs, but for the order of sums."""
    mine, theirs = (
        run_ranks(sum_in_every_format, [0] * len(NODES), cluster=where)
        for where in (cluster(here), cluster(Here.cpu(here.folder)))
    )
    worst = 0.0
    for rank, (found, expected) in enumerate(zip(mine, theirs, strict=True)):
        for name, array in expected.items():
            assert np.array_equal(found[name], mine[0][name]) or name.endswith("residual"), f"rank {rank}, {name}"
            difference = float(np.abs(found[name] - array).max())
            allowed = 0.05 if "sparse" in name else 1e-4  # means of chosen elements, rounded to bf16
            assert difference <= allowed, f"rank {rank}, {name}: off by {difference:.3g}"
            worst = max(worst, difference)
    return {"largest_difference": worst, "sums": float(len(mine[0]))}


def sum_in_every_format(runtime: Runtime) -> dict[str, Any]:
    """Two sums in a row in every format, and what is owed after them."""
    group = group_of(None, runtime.device, 60)
    assert group is not None
    found: dict[str, Any] = {}
    few_bits = {name: one for name, one in FORMATS.items() if isinstance(one, Quantized | Sparse)}
    inside = {f"{name}, inside first": InsideFirst(one, NODES) for name, one in few_bits.items()}
    for name, averager in {**FORMATS, **inside}.items():
        residual = torch.zeros(LENGTH, device=runtime.device) if averager.keeps_residual else None
        for number in range(2):
            random = torch.Generator().manual_seed(10 * runtime.rank + number)
            payload = torch.cat([torch.randn(LENGTH, generator=random), torch.ones(1)]).to(runtime.device)
            total = averager.exchange(payload, 1, group, residual)()
            assert total.device == runtime.device and float(total[-1]) == len(NODES)
            found[f"{name}, sum {number}"] = total.numpy(force=True).copy()
        if residual is not None:
            found[f"{name}, residual"] = residual.numpy(force=True).copy()
    return found


def beside_updates(here: Here) -> dict[str, float]:
    """A few averages beside updates, in fp64, give what CPUs come to; a hundred take no more memory than ten."""
    mine, theirs = (
        run_ranks(average_beside_updates, [0, 0], 3, FullPrecision(torch.float64), cluster=where)
        for where in (cluster(here), cluster(Here.cpu(here.folder)))
    )
    difference = max(float(np.abs(a - b).max()) for a, b in zip(mine[0]["weights"], theirs[0]["weights"], strict=True))
    assert difference < 1e-9, f"parameters differ by {difference:.3g}"
    reserved = run_ranks(average_beside_updates, [0, 0], AVERAGES, FORMATS["int4"], cluster=cluster(here))[0][
        "reserved"
    ]
    added = reserved[-1] - reserved[FIRST]
    assert added <= 0, f"{added / 1e6:.1f} MB were added by {AVERAGES - FIRST} averages"
    return {"parameter_difference": difference, "reserved_mb": reserved[-1] / 1e6}


def average_beside_updates(runtime: Runtime, rounds: int, averager: Averager) -> dict[str, Any]:
    """Weights at the end, and the bytes that torch had of the device after every average."""
    module, device = Tied(width=512).double().to(runtime.device), runtime.device
    optimizers, reserved = adamw(module), list[int]()
    wire = Wire(averager, delay_updates=1)
    with DiLoCo(module, optimizers, UPDATES, wire=wire) as diloco:
        for number in range(rounds * UPDATES):
            update(module, optimizers, batch(runtime.rank, number).to(device))
            if diloco.is_round_end:
                reserved.append(torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)
        diloco.outer_step()
    return {"weights": [one.detach().cpu().numpy() for one in module.parameters()], "reserved": reserved}


def sharded_beside_updates(here: Here, where: ClusterSettings) -> dict[str, float]:
    """DiLoCo around two workers of two ranks each, with a delay, on ranks of those settings: as on CPUs."""
    mine, theirs = (run_ranks(average_sharded, [0] * 4, cluster=one) for one in (where, cluster(Here.cpu(here.folder))))
    difference = max(float(np.abs(a - b).max()) for a, b in zip(mine[0], theirs[0], strict=True))
    assert difference < 1e-9, f"parameters differ by {difference:.3g}"
    return {"parameter_difference": difference}


def average_sharded(runtime: Runtime) -> list[Any]:
    """The whole parameters at the end."""
    names, backend = ("worker", "shard"), runtime.backend.name
    mesh = init_device_mesh(
        runtime.device.type, (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
    )
    module = Tied().double().to(runtime.device)
    fully_shard(module.head, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    optimizers, (worker, part) = adamw(module), divmod(runtime.rank, 2)
    with DiLoCo(module, optimizers, UPDATES, group=mesh["worker"].get_group(),
                wire=Wire(delay_updates=2)) as diloco:  # fmt: skip
        for number in range(5 * UPDATES):
            update(module, optimizers, batch(worker, number).chunk(2)[part].to(runtime.device))
        diloco.outer_step()
    return [getattr(one, "full_tensor", lambda one=one: one)().detach().cpu().numpy() for one in module.parameters()]


def sharded_pool_as_on_cpus(here: Here, where: ClusterSettings) -> dict[str, float]:
    """A run of workers of two ranks each on ranks of those settings, whose averages travel during updates: as on
    CPUs."""
    mine = run_whole(2, 2, here.folder / "mine", *DELAYED, cluster=where)
    theirs = run_whole(2, 2, here.folder / "theirs", *DELAYED)
    difference = max(
        float(np.abs(mine[0]["whole"][trainer][name] - array).max())
        for trainer, anchor in theirs[0]["whole"].items()
        for name, array in anchor.items()
    )
    assert difference < 1e-4, f"anchors differ by {difference:.3g}"
    return {"anchor_difference": difference}


def one_context_per_rank(here: Here) -> dict[str, float]:
    """Of two ranks with a GPU each, none starts anything on the other's while averages travel; needs two GPUs."""
    if not here.is_cuda:
        raise SkippedError("a CPU has no contexts")
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    if count < 2:
        raise SkippedError("this machine has one GPU, where a context too many cannot be seen")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # of the ranks; this process does not start CUDA
    found = run_ranks(gpus_of_this_process, [0, 0], cluster=cluster(here))
    if not all(found):
        raise SkippedError("NVML does not know processes by the ids that they have here")
    assert all(len(gpus) == 1 for gpus in found), f"GPUs on which ranks have a context: {found}"
    return {"contexts_per_rank": 1.0}


def gpus_of_this_process(runtime: Runtime) -> list[int]:
    """The GPUs of the machine on which this process has a context after averages beside updates."""
    average_beside_updates(runtime, 3, FORMATS["int4"])
    dist.barrier()
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    lists = [pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
    pynvml.nvmlShutdown()
    own = int(Path("/proc/self").readlink().name)
    return [index for index, processes in enumerate(lists) if own in {process.pid for process in processes}]


CASES = [
    Case("averages in every format", every_format, 120),
    Case("averages beside updates keep no memory", beside_updates, 120),
    Case("one context per rank", one_context_per_rank, 120),
]
