"""Start and end of a rank: its device, its threads, its place among the others."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from adloco_dist.averaging.checks import is_timeout
from adloco_dist.averaging.group import Group
from adloco_dist.cluster.contact import FIXED, Contact
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.devices import Gpu, choose_backend, choose_device, identity
from adloco_dist.cluster.groups import NCCL_ENVIRONMENT, form_disjoint
from adloco_dist.cluster.heartbeat import Heartbeat
from adloco_dist.cluster.mail import Mail
from adloco_dist.cluster.monitor import Monitor
from adloco_dist.cluster.network import Interface, check_store, join_network
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Backend, ClusterSettings
from adloco_dist.terminal import reported_wait

TEST_SHARED_NCCL = "ADLOCO_TEST_SHARED_NCCL"
"""Environment variable that gpu/nccl.py alone sets: ranks that share a GPU use NCCL, as if each were a machine."""
STORE_SECONDS = 120.0
"""Ranks of one start find each other within this, and answer each other there."""


@dataclass(frozen=True)
class Place:
    """Where a process stands, as torchrun (or a test) says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    num_nodes: int = 1
    init_method: str = "env://"
    host: str | None = None
    """Who holds the store that all ranks share; None: as torchrun says."""

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
    """Backend of the groups that carry tensors."""
    unused_gpu: str | None
    """Why this rank computes on the CPU of a machine that has an NVIDIA GPU, where nobody asked for that."""
    nodes: tuple[int, ...]
    """The node of every rank."""
    hosts: tuple[str, ...]
    """The host name of every rank."""
    ranks_on_device: int
    """Number of ranks on this rank's GPU, or on its node where it computes on the CPU."""
    turn: int
    """Position of this rank among those that share its GPU; 0 on a CPU."""
    num_turns: int
    """Maximum number of ranks that share one GPU, at least 1; the same on all ranks."""
    threads: int
    """CPU threads of this rank."""
    interface: Interface | None
    """Interface of this rank's node; None on a single node for which none was set."""
    control: ControlPlane
    heartbeat: Heartbeat
    monitor: Monitor
    mail: Mail
    store: Store
    """Store that all ranks share, for messages apart from collectives."""
    ranks_per_worker: int = 1
    """S: neighbouring ranks that hold a worker's model together: a seat, which layouts and plans count."""
    of_seat: Group | None = None
    """The ranks of this rank's seat; None where that is this rank alone."""

    @property
    def seat(self) -> int:
        """The seat that this rank is a part of."""
        return self.rank // self.ranks_per_worker

    @property
    def shard(self) -> int:
        """Which of its seat's ranks this is, and so which part of every parameter it holds."""
        return self.rank % self.ranks_per_worker

    @property
    def num_seats(self) -> int:
        return self.world_size // self.ranks_per_worker

    @property
    def seat_nodes(self) -> tuple[int, ...]:
        """The node of every seat."""
        return self.nodes[:: self.ranks_per_worker]


def join_store(place: Place) -> Store:
    """What all ranks share before they are connected to each other; raises a SettingsError, on this rank alone, where
    torchrun's store cannot be reached from here."""
    if place.init_method == "env://":
        check_store()
    timeout = timedelta(seconds=STORE_SECONDS)
    store, _, _ = next(rendezvous(place.init_method, place.rank, place.world_size, timeout=timeout))
    return store


@contextmanager
def started(
    cluster: ClusterSettings,
    place: Place,
    store: Store,
    stop: StopRequest,
    ranks_per_worker: int = 1,
    contact: Contact = FIXED,
) -> Iterator[Runtime]:
    """Join the control plane, settle on devices and backend, and leave in order.

    The default process group is the control plane (gloo); tensors travel in groups of their own. `stop` is set when any
    rank was asked to stop; `ranks_per_worker` is S of `Runtime`.

    Raises:
        SettingsError: on every rank, when the interface, device or backend that was asked for is unsupported on one, or
            nodes cannot reach each other.
    """
    threads = cluster.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // place.local_world_size)
    torch.set_num_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # else each rank starts as many as 32
    os.environ.update(NCCL_ENVIRONMENT)
    # Before the heartbeat: what CUDA does at its start may hold the interpreter for longer than a silence may last.
    chosen = choose_device(cluster.device, place.local_rank)
    silence = cluster.silence_seconds
    heartbeat = Heartbeat(store, place.rank, place.world_size, silence / 10, silence, stop, contact)
    speaks = place.local_rank == 0
    with reported_wait(heartbeat.in_words, speaks):
        host = place.host or os.environ.get("MASTER_ADDR", "")
        interface = join_network(store, place.node, place.num_nodes, speaks, cluster.interface, host)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("control", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=cluster.timeout_seconds),
        )
        assert dist.group.WORLD is not None
        control = ControlPlane(dist.group.WORLD)
        control.agree(chosen.error)
        if TEST_SHARED_NCCL in os.environ:
            os.environ["NCCL_HOSTID"] = f"rank{place.rank}"
        gpu = identity(chosen.device)
        census = control.exchange({"node": place.node, "host": socket.gethostname(), "gpu": gpu and asdict(gpu)})
    gpus = [member["gpu"] and Gpu(**member["gpu"]) for member in census]
    nodes, hosts = (tuple(member[key] for member in census) for key in ("node", "host"))
    uuids = [gpu and gpu.uuid for gpu in gpus]
    turns = [uuids[:rank].count(uuid) if uuid else 0 for rank, uuid in enumerate(uuids)]
    workplaces = [uuid or node for uuid, node in zip(uuids, nodes, strict=True)]
    heartbeat.hosts = hosts
    backend = choose_backend(cluster.backend, gpus, ranks_per_worker)
    seats = [tuple(range(start, start + ranks_per_worker)) for start in range(0, place.world_size, ranks_per_worker)]
    if ranks_per_worker == 1 or place.world_size % ranks_per_worker:  # the latter is refused later, on all ranks
        seats = []
    of_seat = form_disjoint(seats, backend, cluster.timeout_seconds)
    monitor = Monitor(chosen.device)
    try:
        yield Runtime(
            rank=place.rank,
            world_size=place.world_size,
            device=chosen.device,
            backend=backend,
            unused_gpu=chosen.unused_gpu,
            nodes=nodes,
            hosts=hosts,
            ranks_on_device=workplaces.count(workplaces[place.rank]),
            turn=turns[place.rank],
            num_turns=max(turns) + 1,
            threads=threads,
            interface=interface,
            control=control,
            heartbeat=heartbeat,
            monitor=monitor,
            mail=Mail(store, place.rank, place.world_size),
            store=store,
            ranks_per_worker=ranks_per_worker,
            of_seat=of_seat,
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


def forget_groups() -> None:
    """Do without all process groups of a world whose connections are closed."""
    if dist.is_initialized():
        dist.destroy_process_group()
