"""Finding out what every rank stands on: versions, memory, clock, and the links between nodes."""

import hashlib
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil
import pynvml
import torch
import torch.distributed as dist
from torch.cuda import nccl

import adloco_dist
from adloco_dist.cluster.groups import form_group
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.survey import Environment, Link
from adloco_dist.config import Backend

LATENCY_TRIES = 10
BANDWIDTH_TRIES = 3


def survey(runtime: Runtime, disk: Path) -> list[Environment]:
    """All ranks' environments by rank, on every rank. Collective.

    Args:
        disk: an existing folder, where the run's files will be.
    """
    mine = _describe(runtime, disk, runtime.control.clock_offset_seconds())
    return [Environment(**message) for message in runtime.control.exchange(asdict(mine))]


def measure_links(runtime: Runtime, backend: Backend, payload_bytes: int, timeout_seconds: float) -> list[Link]:
    """All-reduces between the first ranks of every two nodes, one pair after the other; the links on every rank.

    Collective over the whole world.
    """
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
            latency = _median_seconds(partial(group.all_reduce, tiny), LATENCY_TRIES)
            seconds = _median_seconds(partial(group.all_reduce, payload), BANDWIDTH_TRIES)
            links[pair] = Link(pair, latency, payload.nbytes / seconds)
            dist.destroy_process_group(group.process_group)
    mine = [asdict(links[pair]) for pair in links if runtime.rank == heads[pair[0]]]
    everyone = runtime.control.exchange({"links": mine})
    found = [link for message in everyone for link in message["links"]]
    return [Link(tuple(link["nodes"]), link["latency_seconds"], link["bytes_per_second"]) for link in found]


def _describe(runtime: Runtime, disk: Path, clock_offset_seconds: float) -> Environment:
    device, interface = runtime.device, runtime.interface
    is_cuda = device.type == "cuda"
    return Environment(
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
        clock_offset_seconds=clock_offset_seconds,
    )


def _median_seconds(action: Callable[[], None], tries: int) -> float:
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


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
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
