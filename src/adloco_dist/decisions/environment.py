"""What the ranks of a run stand on, and which differences between them matter."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco_dist.decisions.records import set_of_ranks

LARGEST_CLOCK_OFFSET_SECONDS = 1.0


@dataclass(frozen=True)
class Environment:
    """Of one rank. Travels as a message and is kept in run.json."""

    rank: int
    node: int
    host: str
    interface: str | None
    address: str | None
    device: str
    driver: str | None
    """Of the GPU."""
    adloco_dist: str
    code: str
    """Digest of the package's sources and config groups."""
    torch: str
    transformers: str
    numpy: str
    python: str
    cores: int
    threads: int
    """Of this rank's CPU operations."""
    memory_bytes: int
    """Available to all of the host's processes."""
    device_memory_bytes: int | None
    """Free on the GPU."""
    disk_bytes: int
    """Free where run directories are made."""
    clock_offset_seconds: float = 0.0
    """Of the host's clock, ahead of rank 0's."""
    nccl: str | None = None
    """Version of NCCL; None where gloo carries the tensors."""
    unused_gpu: str | None = None
    """Why the rank computes on the CPU of a machine that has an NVIDIA GPU, where nobody asked for that."""


@dataclass(frozen=True)
class Link:
    """What two nodes have between them."""

    nodes: tuple[int, int]
    latency_seconds: float
    """Of the smallest all-reduce between them."""
    bytes_per_second: float
    """Payload of a large all-reduce over its time; each side sends as many bytes as the payload has."""


def told_by_value(values: Sequence[object]) -> str:
    """ "2.13 on ranks {0-3}, 2.12 on rank 4", from every rank's value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(
        f"{value} on {f'ranks {set_of_ranks(those)}' if len(those) > 1 else f'rank {those[0]}'}"
        for value, those in ranks.items()
    )


def first_difference(members: Sequence[Mapping[str, Any]]) -> str | None:
    """ "key differs between ranks: ..." for the first key, in order of names, that is not the same in all."""
    for key in sorted({key for member in members for key in member}):
        values = [member.get(key) for member in members]
        if len({str(value) for value in values}) > 1:
            return f"{key} differs between ranks: {told_by_value(values)}"
    return None


def must_agree(environment: Environment) -> dict[str, str]:
    """What two ranks cannot differ in and still compute the same run. Builds of one torch release may."""
    return {
        "adloco_dist version": environment.adloco_dist,
        "adloco_dist code": environment.code,
        "torch": environment.torch.partition("+")[0],
        "NCCL": str(environment.nccl),
    }


def remarks(environments: Sequence[Environment]) -> list[str]:
    """Differences that a run survives, and that explain much of what is strange about one. One line each."""
    lines = []
    for name in ("torch", "transformers", "numpy", "python", "device", "driver", "threads"):
        values = [getattr(environment, name) for environment in environments]
        if len(set(values)) > 1:
            lines.append(f"{name} differs: {told_by_value(values)}")
    for environment in _first_of_each_host(environments):
        if environment.unused_gpu:
            lines.append(
                f"{environment.host} computes on its CPU, for torch cannot use its GPU ({environment.unused_gpu})"
            )
        if abs(environment.clock_offset_seconds) > LARGEST_CLOCK_OFFSET_SECONDS:
            lines.append(
                f"the clock of {environment.host} is {environment.clock_offset_seconds:+.1f} s from that of "
                f"{environments[0].host}: times in logs do not match; synchronise it (chrony, ntpd)"
            )
    return lines


def _first_of_each_host(environments: Sequence[Environment]) -> Iterable[Environment]:
    seen = set()
    for environment in environments:
        if environment.host not in seen:
            seen.add(environment.host)
            yield environment
