"""Which differences between ranks are refused, which are named, and which are neither."""

from dataclasses import asdict, replace

import pytest

from adloco_dist.cluster.environment import Environment, must_agree, remarks
from adloco_dist.text import first_difference, values_by_rank

ONE = Environment(
    rank=0, node=0, host="node1", interface="eth0", address="10.0.0.1", device="CPU x86_64", driver=None,
    adloco_dist="0.1.0", code="abc", torch="2.13.0+cpu", transformers="5.23.0", numpy="2.4.6", python="3.11.7",
    cores=8, threads=4, memory_bytes=10**10, device_memory_bytes=None, disk_bytes=10**11,
)  # fmt: skip


def pool(**change: object) -> list[Environment]:
    """Four ranks on two hosts, the last of which differs."""
    ranks = [replace(ONE, rank=rank, node=rank // 2, host=f"node{rank // 2 + 1}") for rank in range(4)]
    return [*ranks[:3], replace(ranks[3], **change)]


def test_values_are_reported_with_their_ranks() -> None:
    assert values_by_rank(enumerate(["a", "a", "a", "b"])) == "a on ranks {0-2}, b on rank 3"
    assert values_by_rank(enumerate(["a", "b", "a"])) == "a on ranks {0,2}, b on rank 1"


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"code": "def"}, "adloco_dist code differs between ranks: abc on ranks {0-2}, def on rank 3"),
        ({"torch": "2.12.1+cpu"}, "torch differs between ranks: 2.13.0 on ranks {0-2}, 2.12.1 on rank 3"),
        ({"torch": "2.13.0+cu130"}, None),
        ({"nccl": "2.29.7"}, "NCCL differs between ranks: None on ranks {0-2}, 2.29.7 on rank 3"),
        ({"python": "3.12.1", "driver": "580.1", "threads": 8}, None),
        ({}, None),
    ],
)
def test_what_must_agree(change: dict[str, object], refused: str | None) -> None:
    assert first_difference([must_agree(one) for one in pool(**change)]) == refused


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({}, []),
        ({"torch": "2.13.0+cu130"}, ["torch differs: 2.13.0+cpu on ranks {0-2}, 2.13.0+cu130 on rank 3"]),
        ({"threads": 8}, ["threads differs: 4 on ranks {0-2}, 8 on rank 3"]),
        ({"memory_bytes": 5, "address": "10.0.0.9"}, []),
    ],
)
def test_what_is_named(change: dict[str, object], detail: list[str]) -> None:
    assert remarks(pool(**change)) == detail


def test_a_clock_that_is_off_is_named_once_for_its_host() -> None:
    ranks = pool()
    assert remarks([*ranks[:2], *(replace(one, clock_offset_seconds=0.4) for one in ranks[2:])]) == []
    (line,) = remarks([*ranks[:2], *(replace(one, clock_offset_seconds=-2.5) for one in ranks[2:])])
    assert line.startswith("the clock of node2 is -2.5 s from that of node1")


def test_a_gpu_that_is_not_used_is_named_once_for_its_host() -> None:
    ranks = pool()
    (line,) = remarks([*ranks[:2], *(replace(one, unused_gpu="driver too old") for one in ranks[2:])])
    assert line == "node2 computes on its CPU, for torch cannot use its GPU (driver too old)"


def test_an_environment_survives_its_message() -> None:
    assert Environment(**asdict(ONE)) == ONE
