"""Workers that take unequal numbers of updates: their mean, their data, and their placement."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.averaging.group import Group
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.data.indexed import IndexedDataset
from adloco_dist.policy import planning
from adloco_dist.pool.local_pool import LocalPool
from helpers.corpora import write_streams
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import (
    FOUR_TRAINERS,
    held_anchors,
    new_trainer,
    small_settings,
    small_splits,
    small_store,
    train_small_pool,
)
from helpers.tables import CountingTable

UNEQUAL = ("pool.trainers=2", "pool.workers_per_trainer=2", "algorithm.updates_per_round=6", "budget=4rounds")


def fix_speeds() -> None:
    """In place of measured ones, which a test cannot know: the second worker of each trainer is a third as fast."""
    planning.worker_speeds = lambda layout, costs: {trainer: (1.0, 0.34) for trainer in layout.trainers}


def train(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    fix_speeds()
    return train_small_pool(runtime, *FOUR_TRAINERS, *UNEQUAL, *overrides)


BY_LINK = (
    "algorithm.round=link", "algorithm.updates_range=[6,6]", "wire=adaptive", "outer=average",
    "simulation.update_seconds=0.1", "simulation.bytes_per_second=1e6",
)  # fmt: skip
"""On a clock that is the same in every run."""


DELAYED = ("wire.fragments=2", "wire.delay_updates=2")


EXACT = (*BY_LINK, "wire=fp32")
"""What does not depend on how many workers' sum a rank encodes."""


@pytest.mark.parametrize(
    ("overrides", "is_streamed"), [((), False), (DELAYED, False), (DELAYED, True), (EXACT, False), (EXACT, True)]
)
def test_placement_changes_nothing(overrides: tuple[str, ...], is_streamed: bool, tmp_path: Path) -> None:
    """Also with streams from three files for four workers, so that several workers read one."""
    overrides = (*overrides, *(write_streams(tmp_path) if is_streamed else ()))
    alone = run_ranks(train, [0], *overrides)
    expected = held_anchors(alone)
    for nodes in ([0, 0], [0, 0, 1, 1]):
        ranks = run_ranks(train, nodes, *overrides)
        for trainer, anchor in held_anchors(ranks).items():
            np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-9)
    record = alone[0]["records"][-1]
    if is_streamed:
        taken = sum(stream["ordinal"] for state in alone[0]["states"].values() for stream in state["streams"])
        assert taken * 12 == record["pool_tokens"], "every sequence was taken once"
    assert record["worker_updates"] == [6, 2]
    assert record["sequences"] == 2 * (6 + 2)


def test_the_mean_is_weighted_by_updates() -> None:
    trainer = new_trainer(small_settings(*FOUR_TRAINERS, "outer=average"), 3)
    before, changes = trainer.anchor.clone(), (1.0, 4.0, 10.0)
    for worker, change, weight in zip(trainer.workers, changes, (1.0, 0.5, 0.1), strict=True):
        worker.weights.add_(change)
        worker.weight = weight
    trainer.step(0, None)
    mean = (1.0 + 0.5 * 4.0 + 0.1 * 10.0) / 1.6
    torch.testing.assert_close(trainer.anchor, before + mean, rtol=0, atol=1e-9)


def see_an_average(runtime: Runtime) -> dict[str, Any]:
    """The anchor before the average of the only round, where workers stood then, and the anchor after it."""
    fix_speeds()
    seen: dict[str, Any] = {}

    def watch(pool: LocalPool) -> None:
        (trainer,) = pool.trainers.values()
        average = trainer.average

        def watched(fragment: int, group: Group | None, in_four_bits: bool) -> OuterStepReport:
            seen["before"] = trainer.anchor.numpy().copy()  # of a tensor the other process might not find the memory
            seen["standing"] = [worker.weights.numpy().copy() for worker in trainer.workers]
            return average(fragment, group, in_four_bits)

        trainer.average = watched

    one_round = ("pool.trainers=1", "wire.delay_updates=0", "budget=1rounds")
    done = train_small_pool(runtime, *FOUR_TRAINERS, *UNEQUAL, *EXACT, *one_round, prepare=watch)
    return {**seen, "updates": done["records"][-1]["worker_updates"], "after": done["anchors"][0]}


def test_a_round_that_follows_the_link_counts_workers_by_their_updates() -> None:
    (seen,) = run_ranks(see_an_average, [0])
    assert seen["updates"] == [6, 2]
    (first, second), before = seen["standing"], seen["before"]
    mean = (6 * (first - before) + 2 * (second - before)) / 8
    assert np.abs(mean).max() > 0
    np.testing.assert_allclose(seen["after"], before + mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("num_workers", "rate"), [(1, 1.0), (2, 1.0), (4, 1.26), (16, 2.0)])
def test_many_workers_take_a_longer_step(num_workers: int, rate: float) -> None:
    """By the cube root of half their number; of those that are finite, and as much as each counts for."""
    follows = ("outer=average", "outer.follows_workers=true")
    trainer = new_trainer(small_settings(*FOUR_TRAINERS, *follows), num_workers + 1)
    before = trainer.anchor.clone()
    for number, worker in enumerate(trainer.workers):
        worker.weights.add_(1.0 + number)
    trainer.workers[-1].weights[0] = float("nan")
    trainer.step(0, None)
    mean = (1.0 + num_workers) / 2
    torch.testing.assert_close(trainer.anchor, before + rate * mean, rtol=0, atol=1e-9)


def count_sequences(runtime: Runtime, overrides: tuple[str, ...]) -> dict[str, Any]:
    fix_speeds()
    whole = small_store()
    table = CountingTable(whole.parts, whole.sequence_length)
    splits = replace(small_splits(), train=IndexedDataset(table))
    chosen = (*FOUR_TRAINERS, *UNEQUAL, *overrides)
    done = train_small_pool(runtime, *chosen, splits=splits, prepare=lambda pool: table.read.clear())
    return {**done, "read": table.read}


@pytest.mark.parametrize("overrides", [(), BY_LINK])
def test_each_sequence_is_read_once_an_epoch(overrides: tuple[str, ...]) -> None:
    ranks = run_ranks(count_sequences, [0, 0], overrides)
    seen = Counter(sequence for rank in ranks for sequence in rank["read"])
    assert sum(seen.values()) == sum(record.get("sequences", 0) for record in ranks[0]["records"]) == 2 * 4 * 16
    # Shards of 60 are read once, and then four sequences of each a second time.
    assert Counter(seen.values()) == {1: 112, 2: 8}


def train_and_stop(runtime: Runtime, folder: str, looks: int | None, overrides: tuple[str, ...]) -> dict[str, Any]:
    fix_speeds()
    return train_kept(runtime, folder, looks, *FOUR_TRAINERS, *UNEQUAL, *overrides)


@pytest.mark.parametrize(
    ("overrides", "is_streamed"),
    [(("wire.fragments=2",), False), (BY_LINK, False), (BY_LINK, True), (DELAYED, True)],
)
def test_stopped_in_the_middle_and_resumed_is_the_same_run(
    tmp_path: Path, overrides: tuple[str, ...], is_streamed: bool
) -> None:
    overrides = (*overrides, *(write_streams(tmp_path / "corpus") if is_streamed else ()))
    ranks = run_ranks(train_and_stop, [0, 0], str(tmp_path / "whole"), None, overrides)
    assert ranks[0]["records"][-1]["worker_updates"] == [6, 2]
    whole = held_anchors(ranks)
    for looks in (3, 9, 14):
        folder = str(tmp_path / str(looks))
        assert run_ranks(train_and_stop, [0, 0], folder, looks, overrides)[0]["stop"] == "interrupted"
        for trainer, anchor in held_anchors(run_ranks(train_and_stop, [0, 0], folder, None, overrides)).items():
            np.testing.assert_array_equal(anchor, whole[trainer])
