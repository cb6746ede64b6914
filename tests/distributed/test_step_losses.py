"""The loss of every update in the records: what the round's loss is the mean of, on any ranks and after a restart."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy import planning
from adloco_dist.policy.plan import INTERRUPTED
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.sharded import run_whole
from helpers.support import FOUR_TRAINERS, held_anchors, train_small_pool

RECORDED = (
    "run.step_losses=true", "pool.trainers=1", "pool.workers_per_trainer=4", "algorithm.updates_per_round=6",
    "checkpoint.every=null",
)  # fmt: skip
FRAGMENTS = ("wire.fragments=2", "wire.delay_updates=1")


def of_rounds(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in ranks[0]["records"] if record["round"]]


def losses(ranks: list[dict[str, Any]]) -> Any:
    """(rounds, updates)"""
    return np.array([record["step_losses"] for record in of_rounds(ranks)])


@pytest.mark.parametrize("overrides", [(), FRAGMENTS, ("instances.concurrency=threads",)])
def test_their_mean_is_the_rounds_loss_on_any_ranks(overrides: tuple[str, ...]) -> None:
    alone = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, *RECORDED, *overrides)
    assert losses(alone).shape == (4, 6)
    rounds = [record["train_loss"] for record in of_rounds(alone)]
    np.testing.assert_allclose(losses(alone).mean(axis=1), rounds, rtol=0, atol=1e-12)
    assert losses(alone)[0, 0] > losses(alone)[-1, -1], "it learned"
    spread = run_ranks(train_small_pool, [0, 0, 1, 1], *FOUR_TRAINERS, *RECORDED, *overrides)
    np.testing.assert_allclose(losses(spread), losses(alone), rtol=0, atol=1e-9)


def test_without_the_setting_there_are_none() -> None:
    (alone,) = run_ranks(train_small_pool, [0], *FOUR_TRAINERS, "budget=1rounds")
    assert all("step_losses" not in record for record in alone["records"])


def test_ranks_that_hold_a_worker_together_add_up(tmp_path: Path) -> None:
    wanted = ("run.step_losses=true", "pool.trainers=1", "pool.workers_per_trainer=2", "batching.local_batch=3")
    one, two = (losses(run_whole(size, 2, tmp_path / str(size), *wanted)) for size in (1, 2))
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-9)


def train_unequal(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    """The first two workers take six updates, the others two."""
    planning.worker_speeds = lambda layout, costs: {0: (1.0, 1.0, 0.34, 0.34)}
    return train_small_pool(runtime, *FOUR_TRAINERS, *RECORDED, *overrides)


@pytest.mark.parametrize("overrides", [(), FRAGMENTS])
def test_an_update_is_a_mean_over_the_workers_that_took_it(overrides: tuple[str, ...]) -> None:
    alone = run_ranks(train_unequal, [0], *overrides)
    first = of_rounds(alone)[0]
    assert first["worker_updates"] == [6, 6, 2, 2]
    step, expected = first["step_losses"], first["train_loss"]
    assert len(step) == 6
    # Four workers' means, of which two are over the first two updates alone: what the fast ones had there is known from
    # their own run, in which the slow ones do not exist.
    spread = run_ranks(train_unequal, [0, 0, 1, 1], *overrides)
    np.testing.assert_allclose(losses(spread), losses(alone), rtol=0, atol=1e-9)
    low, high = min(step), max(step)
    assert low < expected < high
    assert all(abs(loss - expected) < 0.5 for loss in step), "means, and no sums of two or four"


def kept(runtime: Runtime, folder: str, looks: int | None, overrides: list[str]) -> dict[str, Any]:
    return train_kept(runtime, folder, looks, *FOUR_TRAINERS, *overrides)


@pytest.mark.parametrize("fragments", [(), FRAGMENTS])
@pytest.mark.parametrize("looks", [3, 20])
def test_updates_before_a_restart_are_unknown(tmp_path: Path, looks: int, fragments: tuple[str, ...]) -> None:
    wanted = [*RECORDED, *fragments]
    whole = run_ranks(kept, [0, 0], str(tmp_path / "whole"), None, wanted)
    stopped = run_ranks(kept, [0, 0], str(tmp_path / "run"), looks, wanted)
    assert {rank["stop"] for rank in stopped} == {INTERRUPTED}
    ended = run_ranks(kept, [0, 0], str(tmp_path / "run"), None, wanted)
    np.testing.assert_array_equal(held_anchors(ended)[0], held_anchors(whole)[0])
    done = max(done for rank in stopped for done in rank["updates_done"])
    assert 0 < done <= 6
    lines = (tmp_path / "run" / "shared" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["round"]]
    interrupted = stopped[0]["round"]
    for number, (row, expected) in enumerate(zip(rows, losses(whole), strict=True)):
        unknown = done if number == interrupted else 0
        assert row["step_losses"][:unknown] == [None] * unknown
        assert row["step_losses"][unknown:] == expected[unknown:].tolist()


def poison(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    def prepare(pool: Any) -> None:
        pool.trainers[0].workers[0].weights.fill_(math.nan)

    return train_small_pool(runtime, *FOUR_TRAINERS, *RECORDED, *overrides, prepare=prepare)


def test_a_loss_that_is_not_finite_is_none() -> None:
    (alone,) = run_ranks(poison, [0], "budget=2rounds")
    first, second = of_rounds([alone])
    assert all(math.isnan(loss) for loss in first["step_losses"]), "which files have as null"
    assert first["nonfinite_workers"] == [0]
    assert all(math.isfinite(loss) for loss in second["step_losses"]), "the worker began anew"
