"""Several instances on one rank: in turn, at once or swapping, the run is the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend, SettingsError
from adloco_dist.pool.local_pool import LocalPool
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, train_small_pool

MANY = (
    "pool.trainers=3", "pool.workers_per_trainer=2", "merge=worst_with_worst", "merge.every_rounds=2",
    "budget=5rounds", "batching.request=norm_test", "batching.eta=0.7", "inner.lr=5e-3",
)  # fmt: skip


def train_on_threads(runtime: Runtime, threads: int, *overrides: str) -> dict[str, Any]:
    """As on a rank that has that many CPU threads."""
    found: dict[str, Any] = {}

    def look(pool: LocalPool) -> None:
        found.update(slots=len(pool.slots), is_concurrent=pool.is_concurrent)

    return {**train_small_pool(replace(runtime, threads=threads), *FOUR_TRAINERS, *overrides, prepare=look), **found}


def run(*overrides: str, threads: int = 1) -> list[dict[str, Any]]:
    return run_ranks(train_on_threads, [0, 0], threads, *MANY, *overrides)


@pytest.fixture(scope="module")
def in_turn() -> list[dict[str, Any]]:
    return run()


def largest_difference(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    assert [record.get("total_batch") for record in mine[0]["records"]] == [
        record.get("total_batch") for record in theirs[0]["records"]
    ]
    return max(
        float(np.abs(anchor - other["anchors"][trainer]).max())
        for rank, other in zip(mine, theirs, strict=True)
        for trainer, anchor in rank["anchors"].items()
    )


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_instances_at_once_are_the_same_run(in_turn: list[dict[str, Any]], threads: int) -> None:
    concurrent = run("instances.concurrency=threads", threads=threads)
    assert [(rank["slots"], rank["is_concurrent"]) for rank in concurrent] == [(min(threads, 3), True)] * 2
    assert largest_difference(in_turn, concurrent) < 1e-9
    assert all(record["seconds"]["inner"] > 0 for record in concurrent[0]["records"] if record["round"])


def test_measuring_which_way_is_faster_leaves_no_trace(in_turn: list[dict[str, Any]]) -> None:
    measured = run("instances.concurrency=auto", threads=3)
    assert len({rank["is_concurrent"] for rank in measured}) == 1, "one way for the whole pool"
    assert largest_difference(in_turn, measured) < 1e-9


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_instances_that_swap_are_the_same_run_to_the_bit(
    in_turn: list[dict[str, Any]], resident: int, optimizer: str
) -> None:
    momentum = [] if optimizer == "adamw" else ["inner=sgd", "inner.momentum=0.5", "inner.lr=0.1"]
    staying = in_turn if optimizer == "adamw" else run(*momentum)
    assert largest_difference(staying, run(f"instances.resident={resident}", *momentum)) == 0.0


def refused(runtime: Runtime, *overrides: str) -> str:
    try:
        train_small_pool(runtime, *FOUR_TRAINERS, *overrides)
    except SettingsError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("overrides", "detail"),
    [
        (
            ["instances.concurrency=threads", "algorithm=ddp", "pool.trainers=1", "pool.workers_per_trainer=null"],
            "instances.concurrency=threads: algorithm=ddp has one instance per rank; use serial",
        ),
        (["instances.concurrency=streams"], "instances.concurrency=streams: a rank computes on a CPU"),
        (
            ["instances.concurrency=threads", "model.overrides.resid_pdrop=0.1"],
            "instances.concurrency=threads: the model draws random numbers",
        ),
        (["cluster.memory_bytes=1000"], "data.sequence_length=12: a micro-batch of one sequence does not fit"),
    ],
)  # fmt: skip
def test_what_a_device_cannot_do_is_reported_on_every_rank(overrides: list[str], detail: str) -> None:
    for line in run_ranks(refused, [0, 0], *overrides):
        assert line.startswith(detail)
        assert "\n" not in line


def limited(runtime: Runtime) -> list[list[tuple[int, ...]]]:
    """What is formed after each of some groups was asked for, where a rank may be in two."""
    groups = Groups(Backend.gloo, timeout_seconds=60, maximum=2)
    formed = []
    for ranks in [(0, 1), (1, 2), (2, 3), (0, 1), (1, 3), (0, 1, 2, 3), (2,)]:
        group = groups.of(ranks)
        assert (group is not None) == (runtime.rank in ranks and len(ranks) > 1)
        formed.append(groups.formed)
    groups.keep([(0, 1)])
    return [*formed, groups.formed]


def test_the_least_recently_used_group_makes_room() -> None:
    for formed in run_ranks(limited, [0, 0, 1, 1]):
        assert formed == [
            [(0, 1)],
            [(0, 1), (1, 2)],
            [(0, 1), (1, 2), (2, 3)],
            [(1, 2), (2, 3), (0, 1)],
            [(2, 3), (0, 1), (1, 3)],
            [(1, 3), (0, 1, 2, 3)],
            [(1, 3), (0, 1, 2, 3)],
            [],
        ]
