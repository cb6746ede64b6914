"""Which device a rank computes on, and which backend joins those of all ranks."""

import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from adloco_dist.config import Backend, Device, SettingsError
from adloco_dist.text import first_line

DEVICES = Path("/dev")
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose."""


@dataclass(frozen=True)
class Gpu:
    """What distinguishes the GPUs of a run, across nodes too. Travels as a message."""

    uuid: str
    """UUID of what torch computes on: a whole GPU, or a part of one (MIG)."""
    slot: str
    """Where the whole GPU is, as NCCL sees it: the machine, and the address on its bus."""


@dataclass(frozen=True)
class ChosenDevice:
    """A rank's device."""

    device: torch.device
    error: SettingsError | None = None
    """Why this rank cannot have the device that was asked for; all ranks raise it."""
    unused_gpu: str | None = None
    """Why this is the CPU although the machine has an NVIDIA GPU, where nobody asked for that."""


def num_gpus() -> int:
    """The number of GPUs that torch can use here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: `choose_device` reports it
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(wanted: Device, local_rank: int) -> ChosenDevice:
    """The rank's device, set up for use; ranks beyond the number of GPUs share them (only gloo allows that)."""
    cpu = torch.device("cpu")
    if wanted is Device.cpu:
        return ChosenDevice(cpu)
    count, host = num_gpus(), socket.gethostname()
    if not count and wanted is Device.auto:
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN
        has_nvidia_gpu = not is_hidden and any(DEVICES.glob("nvidia[0-9]*"))
        return ChosenDevice(cpu, unused_gpu=_why_unusable() if has_nvidia_gpu else None)
    if not count:
        where = f"{host} has no GPU that torch {torch.__version__} can use ({_why_unusable()})"
        line = f"cluster.device=cuda: {where}; set cluster.device=cpu, or install what is missing there"
        return ChosenDevice(cpu, SettingsError(line))
    index = local_rank % count
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.ones(1, device=device).item()  # memory, and a kernel
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        where = f"GPU {index} of {host} cannot be used ({first_line(error)})"
        remedy = "nvidia-smi shows who uses it and how; choose others with CUDA_VISIBLE_DEVICES, or cluster.device=cpu"
        return ChosenDevice(cpu, SettingsError(f"cluster.device={wanted.name}: {where}; {remedy}"))
    return ChosenDevice(device)


def identity(device: torch.device) -> Gpu | None:
    """What distinguishes a GPU from all others of the run; None for a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # torch's stub does not know them, and builds for other makers' GPUs may not have them.
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    uuid = str(properties.uuid)
    # What NCCL distinguishes machines by: two containers of one have different host names, and are two to it.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot}"
    return Gpu(uuid, uuid if None in address else f"{machine} {address}")


def choose_backend(wanted: Backend, gpus: Sequence[Gpu | None], ranks_per_worker: int = 1) -> Backend:
    """The backend for tensors, the same on every rank: it depends on the GPUs of all. Raises a SettingsError where NCCL
    was asked for, and a rank has no GPU of its own, and where ranks with GPUs would gather a worker's layers over
    gloo, which ends their processes (docs/gpus.md)."""
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    slots = [gpu and gpu.slot for gpu in gpus]
    crowded = next((slot for slot in slots if slot and slots.count(slot) > 1), None)
    if wanted is not Backend.nccl:
        is_gloo = wanted is Backend.gloo or without or crowded
        if is_gloo and ranks_per_worker > 1 and any(gpus):
            rule = "must be 1 where ranks with GPUs are joined by gloo; start one rank per GPU, without cluster.backend"
            raise SettingsError.of("pool.ranks_per_worker", ranks_per_worker, rule)
        return Backend.gloo if is_gloo else Backend.nccl
    if without:
        ranks = ", ".join(map(str, without))
        raise SettingsError(f"cluster.backend=nccl: rank {ranks} has no GPU; set cluster.backend=gloo")
    if crowded:
        shared = [rank for rank, slot in enumerate(slots) if slot == crowded]
        is_whole = len({gpu.uuid for gpu in gpus if gpu and gpu.slot == crowded}) < len(shared)
        relation = "share" if is_whole else "are on parts (MIG) of"
        rule = f"ranks {', '.join(map(str, shared))} {relation} one GPU, which NCCL cannot do"
        raise SettingsError(f"cluster.backend=nccl: {rule}; start one rank per GPU, or set cluster.backend=gloo")
    return Backend.nccl


def _why_unusable() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch finds none"


@dataclass
class Timing:
    """The wall time of a block, once it has ended."""

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Timing]:
    """Measure the wall time of the block, its work on the device included."""
    timing = Timing()
    wait_for(device)
    start = time.perf_counter()
    yield timing
    wait_for(device)
    # To the microsecond: a thousand ranks report these to rank 0.
    timing.seconds = round(time.perf_counter() - start, 6)


def wait_for(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
