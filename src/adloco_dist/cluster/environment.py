"""What every rank stands on: versions, memory, clock, the links between nodes, and which differences matter."""

import hashlib
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from statistics import median
from timeit import repeat

import numpy as np
import psutil
import pynvml
import torch
import torch.distributed as dist
from torch.cuda import nccl

import adloco_dist
from adloco_dist.cluster.groups import form_group
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend
from adloco_dist.messages import decode, encode
from adloco_dist.text import values_by_rank

LATENCY_TRIES = 10
BANDWIDTH_TRIES = 3
MAX_CLOCK_OFFSET_SECONDS = 1.0


@dataclass(frozen=True)
class Environment:
    """What one rank stands on. Travels as a message and is kept in run.json."""

    rank: int
    node: int
    host: str
    interface: str | None
    address: str | None
    device: str
    driver: str | None
    """Version of the GPU's driver, where that is NVIDIA's; else None."""
    adloco_dist: str
    code: str
    """Digest of the package's sources and config groups."""
    torch: str
    transformers: str
    numpy: str
    python: str
    cores: int
    threads: int
    """Threads of this rank's CPU operations."""
    memory_bytes: int
    """Memory available to all of the host's processes."""
    device_memory_bytes: int | None
    """Free memory of the GPU; None on a CPU."""
    disk_bytes: int
    """Free space where run directories are made."""
    clock_offset_seconds: float = 0.0
    """How far the host's clock is ahead of rank 0's."""
    nccl: str | None = None
    """Version of NCCL; None where gloo carries the tensors."""
    unused_gpu: str | None = None
    """Why the rank computes on the CPU of a machine that has an NVIDIA GPU, where nobody asked for that."""


@dataclass(frozen=True)
class Link:
    """The network between two nodes."""

    nodes: tuple[int, int]
    latency_seconds: float
    """Time of the smallest all-reduce between them: a round trip."""
    bytes_per_second: float
    """Payload of a large all-reduce over the time that it takes longer than the smallest; each side sends as many bytes
    as the payload has."""


def survey(runtime: Runtime, disk: Path) -> list[Environment]:
    """All ranks' environments by rank, on every rank; `disk` is a folder where the run's files will be. Collective."""
    device, interface, is_cuda = runtime.device, runtime.interface, runtime.device.type == "cuda"
    environment = Environment(
        rank=runtime.rank,
        node=runtime.nodes[runtime.rank],
        host=runtime.hosts[runtime.rank],
        interface=interface.name if interface else None,
        address=interface.address if interface else None,
        device=torch.cuda.get_device_name(device) if is_cuda else f"CPU {platform.machine()}",
        driver=_driver_version() if is_cuda else None,
        nccl=".".join(map(str, nccl.version())) if runtime.backend is Backend.nccl else None,
        unused_gpu=runtime.unused_gpu,
        adloco_dist=adloco_dist.__version__,
        code=_code_digest(),
        torch=torch.__version__,
        transformers=version("transformers"),
        numpy=np.__version__,
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        threads=runtime.threads,
        memory_bytes=psutil.virtual_memory().available,
        device_memory_bytes=torch.cuda.mem_get_info(device)[0] if is_cuda else None,
        disk_bytes=psutil.disk_usage(str(disk)).free,
        clock_offset_seconds=runtime.control.clock_offset_seconds(),
    )
    return [Environment(**message) for message in runtime.control.exchange(asdict(environment))]


def measure_links(runtime: Runtime, backend: Backend, payload_bytes: int, timeout_seconds: float) -> list[Link]:
    """All links, measured by all-reduces between the first ranks of every two nodes, pair by pair. Collective."""
    heads = {node: rank for rank, node in reversed(list(enumerate(runtime.nodes)))}
    links = {}
    for pair in combinations(sorted(heads), 2):
        ranks = tuple(sorted(heads[node] for node in pair))
        group = form_group(ranks, backend, timeout_seconds)
        if group is not None:
            device = runtime.device if backend is Backend.nccl else torch.device("cpu")
            tiny, payload = torch.zeros(1, device=device), torch.zeros(payload_bytes // 4, device=device)
            for tensor in (tiny, payload):  # connections are made by the first use
                group.all_reduce(tensor)
            latency = median(repeat(partial(group.all_reduce, tiny), number=1, repeat=LATENCY_TRIES))
            seconds = median(repeat(partial(group.all_reduce, payload), number=1, repeat=BANDWIDTH_TRIES))
            # On a fast link both take about as long.
            links[pair] = Link(pair, latency, payload.nbytes / max(seconds - latency, seconds / 10))
            dist.destroy_process_group(group.process_group)
    measured_here = [link for pair, link in links.items() if runtime.rank == heads[pair[0]]]
    messages = runtime.control.exchange({"links": encode(measured_here)})
    return [link for message in messages for link in decode(list[Link], message["links"])]


def must_agree(environment: Environment) -> dict[str, str]:
    """What must be equal on all ranks of a run."""
    return {**_of_code(environment.adloco_dist, environment.code, environment.torch), "NCCL": str(environment.nccl)}


def code_here() -> dict[str, str]:
    """The part of it that a process knows before it meets others."""
    return _of_code(adloco_dist.__version__, _code_digest(), torch.__version__)


def _of_code(ours: str, digest: str, torch_version: str) -> dict[str, str]:
    """Builds of one torch release may differ."""
    torch_release = torch_version.partition("+")[0]
    return {"adloco_dist version": ours, "adloco_dist code": digest, "torch": torch_release}


def remarks(environments: Sequence[Environment]) -> list[str]:
    """Differences that a run survives, and that may explain what is strange about it. One line each."""
    lines = []
    for name in ("torch", "transformers", "numpy", "python", "device", "driver", "threads"):
        values = [getattr(environment, name) for environment in environments]
        if len(set(values)) > 1:
            lines.append(f"{name} differs: {values_by_rank(enumerate(values))}")
    hosts = [environment.host for environment in environments]
    for host in dict.fromkeys(hosts):
        first = environments[hosts.index(host)]
        if first.unused_gpu:
            lines.append(f"{host} computes on its CPU, for torch cannot use its GPU ({first.unused_gpu})")
        if abs(first.clock_offset_seconds) > MAX_CLOCK_OFFSET_SECONDS:
            offset = f"is {first.clock_offset_seconds:+.1f} s from that of {hosts[0]}"
            lines.append(f"the clock of {host} {offset}: times in logs do not match; synchronise it (chrony, ntpd)")
    return lines


def _code_digest() -> str:
    """Return a digest of every source file and config group of the installed package."""
    package, groups = Path(adloco_dist.__file__).parent, Path(str(files("adloco_dist.conf")))
    content = {path.relative_to(package): path for path in package.rglob("*.py")}
    content |= {Path("conf") / path.relative_to(groups): path for path in groups.rglob("*.yaml")}
    digest = hashlib.sha256()
    for name, path in sorted(content.items()):
        digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without its library, as with AMD's GPUs and in some containers."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None
