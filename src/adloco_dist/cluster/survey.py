"""What the ranks of a run stand on, and which differences between them matter."""

from collections.abc import Sequence
from dataclasses import dataclass

from adloco_dist.text import values_by_rank

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
    """Time of the smallest all-reduce between them."""
    bytes_per_second: float
    """Payload of a large all-reduce over its time; each side sends as many bytes as the payload has."""


def must_agree(environment: Environment) -> dict[str, str]:
    """What must be equal on all ranks of a run. Builds of one torch release may differ."""
    return {
        "adloco_dist version": environment.adloco_dist,
        "adloco_dist code": environment.code,
        "torch": environment.torch.partition("+")[0],
        "NCCL": str(environment.nccl),
    }


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
