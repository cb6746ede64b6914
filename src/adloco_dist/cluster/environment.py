"""Finding out what every rank stands on: versions, memory, clock, and the links between nodes."""

import hashlib
import os
import platform
from contextlib import suppress
from dataclasses import asdict
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
from adloco_dist.cluster.survey import Environment, Link
from adloco_dist.config import Backend
from adloco_dist.messages import decode, encode

LATENCY_TRIES = 10
BANDWIDTH_TRIES = 3


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
            links[pair] = Link(pair, latency, payload.nbytes / seconds)
            dist.destroy_process_group(group.process_group)
    measured_here = [link for pair, link in links.items() if runtime.rank == heads[pair[0]]]
    messages = runtime.control.exchange({"links": encode(measured_here)})
    return [link for message in messages for link in decode(list[Link], message["links"])]


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
