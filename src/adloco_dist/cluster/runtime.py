"""Start and end of a rank: its device, its threads, its place among the others."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.failures import is_timeout
from adloco_dist.cluster.heartbeat import Heartbeat
from adloco_dist.cluster.monitor import Monitor
from adloco_dist.cluster.network import Interface, check_store, join_network
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Backend, ClusterSettings, Device, SettingsError
from adloco_dist.terminal import told_wait

TEST_SHARED_NCCL = "ADLOCO_TEST_SHARED_NCCL"
"""In the environment of gpu/nccl.py alone: ranks that share a GPU use NCCL, which takes each of them for a host."""
STORE_SECONDS = 120.0
"""Ranks of one start find each other within this, and answer each other there."""


@dataclass(frozen=True)
class Place:
    """Where a process stands, as torchrun tells it (or a test)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int = 1
    init_method: str = "env://"

    @classmethod
    def from_torchrun(cls) -> "Place":
        """What torchrun wrote into the environment of this process."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        rank, world_size, local_rank, local_world_size, node, num_nodes = (int(os.environ[name]) for name in names)
        return cls(rank, world_size, local_rank, local_world_size, node, num_nodes)


@dataclass(frozen=True)
class Runtime:
    """One rank of a started run."""

    rank: int
    world_size: int
    device: torch.device
    backend: Backend
    """Of the groups that carry tensors."""
    nodes: tuple[int, ...]
    """The node of every rank."""
    hosts: tuple[str, ...]
    """The host name of every rank."""
    ranks_on_device: int
    """Ranks that share this one's GPU, or its node where it computes on the CPU, itself included."""
    threads: int
    """CPU threads of this rank."""
    interface: Interface | None
    """Of this rank's node; None on a single node."""
    control: ControlPlane
    heartbeat: Heartbeat
    monitor: Monitor
    store: Store
    """Shared by all ranks, for what is told apart from collectives."""


def join_store(place: Place) -> Store:
    """What all ranks share before they are connected to each other.

    Raises:
        SettingsError: torchrun's cannot be reached from here; on this rank alone.
    """
    if place.init_method == "env://":
        check_store()
    timeout = timedelta(seconds=STORE_SECONDS)
    store, _, _ = next(rendezvous(place.init_method, place.rank, place.world_size, timeout=timeout))
    return store


@contextmanager
def started(cluster: ClusterSettings, place: Place, store: Store, stop: StopRequest) -> Iterator[Runtime]:
    """Join the control plane, settle on devices and backend, and leave in order.

    The default process group is the control plane (gloo); tensors travel in groups of their own.

    Args:
        stop: set when any rank was asked to stop.

    Raises:
        SettingsError: on every rank, when the interface, device or backend that was asked for cannot be had on one, or
            nodes cannot reach each other.
    """
    threads = cluster.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // place.local_world_size)
    torch.set_num_threads(threads)
    heartbeat = Heartbeat(store, place.rank, place.world_size, cluster.heartbeat_seconds, cluster.silence_seconds, stop)
    speaks = place.local_rank == 0
    with told_wait(heartbeat.in_words, speaks):
        interface = join_network(store, place.node, place.num_nodes, speaks, cluster.interface)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("control", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=cluster.control_seconds),
        )
        assert dist.group.WORLD is not None
        control = ControlPlane(dist.group.WORLD)
        device, error = _choose_device(cluster.device, place.local_rank)
        control.agree(error)
        place_of_work = {"node": place.node, "host": socket.gethostname(), "device": _identity(device)}
        census = control.exchange(place_of_work)
        gpus = [member["device"] for member in census]
        if TEST_SHARED_NCCL in os.environ:
            os.environ["NCCL_HOSTID"] = f"rank{place.rank}"
            gpus = [gpu and f"{gpu} of rank {rank}" for rank, gpu in enumerate(gpus)]
    heartbeat.hosts = hosts = tuple(member["host"] for member in census)
    monitor = Monitor(device)
    try:
        yield Runtime(
            rank=place.rank,
            world_size=place.world_size,
            device=device,
            backend=choose_backend(cluster.backend, gpus),
            nodes=tuple(member["node"] for member in census),
            hosts=hosts,
            ranks_on_device=census.count(place_of_work),
            threads=threads,
            interface=interface,
            control=control,
            heartbeat=heartbeat,
            monitor=monitor,
            store=store,
        )
    except RuntimeError as error:
        if is_timeout(error):
            error.add_note(f"waiting for {', '.join(heartbeat.behind()) or 'ranks that have come as far'}")
        raise
    finally:
        heartbeat.close()
        monitor.close()
    # Not in a `finally`: after an error no more collectives; the process ends and torchrun ends the rest.
    dist.destroy_process_group()


def _choose_device(wanted: Device, local_rank: int) -> tuple[torch.device, SettingsError | None]:
    """The rank's device; ranks beyond the number of GPUs share them (only gloo allows that)."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is Device.cpu or (wanted is Device.auto and not num_gpus):
        return torch.device("cpu"), None
    if not num_gpus:
        where = socket.gethostname()
        line = f"cluster.device=cuda: {where} has no GPU that torch {torch.__version__} can use; set cluster.device=cpu"
        return torch.device("cpu"), SettingsError(line)
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device, None


def _identity(device: torch.device) -> str | None:
    """What tells two GPUs apart, across nodes too; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def choose_backend(wanted: Backend, devices: list[str | None]) -> Backend:
    """The backend for tensors; the same on every rank, for it depends on all devices.

    Args:
        devices: every rank's GPU, None where it has none.

    Raises:
        SettingsError: NCCL was asked for, and a rank has no GPU of its own.
    """
    gpus = [device for device in devices if device is not None]
    shared = len(set(gpus)) < len(gpus)
    if wanted is not Backend.nccl:
        all_alone = len(gpus) == len(devices) and not shared
        return Backend.nccl if wanted is Backend.auto and all_alone else Backend.gloo
    if len(gpus) < len(devices):
        without = ", ".join(str(rank) for rank, device in enumerate(devices) if device is None)
        raise SettingsError(f"cluster.backend=nccl: rank {without} has no GPU; set cluster.backend=gloo")
    if shared:
        twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        ranks = ", ".join(str(rank) for rank, device in enumerate(devices) if device == twice)
        raise SettingsError(
            f"cluster.backend=nccl: ranks {ranks} share one GPU, which NCCL cannot do; start one rank per GPU, "
            "or set cluster.backend=gloo"
        )
    return Backend.nccl
