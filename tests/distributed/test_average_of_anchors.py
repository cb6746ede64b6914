"""The average of a trainer's anchors (outer.average_span): what it is, and that nothing else changes."""

from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.trainer import average_in, weight_of
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, held_anchors, train_small_pool

SPAN = 0.4
ONE = ("pool.trainers=1", "pool.workers_per_trainer=2", "inner.schedule=constant", "inner.warmup_fraction=0",
       "inner.lr=1e-2", "evaluation.every=1rounds")  # fmt: skip


def trained(rounds: int, *overrides: str) -> list[dict[str, Any]]:
    return run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *ONE, f"budget={rounds}rounds", *overrides)


def test_the_average_of_a_steady_course_lags_by_its_span() -> None:
    """For an anchor x = t the average m obeys m' = (x - m) / (span t), so m = t / (1 + span)."""
    mean = torch.zeros(1, dtype=torch.float64)
    for step in range(1000):
        average_in(mean, torch.tensor([step + 0.5], dtype=torch.float64), weight_of(8 * step, 8, SPAN))
        if step == 0:
            assert mean == 0.5, "what was there before the first round counts for nothing"
    assert mean.item() == pytest.approx(1000 / (1 + SPAN), rel=1e-3)


@pytest.mark.parametrize("wire", [(), ("wire=adaptive", "wire.delay_updates=1", "outer=average")])
def test_it_is_what_is_evaluated_and_saved(wire: tuple[str, ...]) -> None:
    plain = [trained(rounds, *wire) for rounds in (1, 2, 3, 4)]
    averaged = trained(4, *wire, f"outer.average_span={SPAN}")
    assert np.array_equal(held_anchors(averaged)[0], held_anchors(plain[3])[0]), "training knows nothing of it"
    mean = held_anchors(plain[0])[0].copy()
    for done, ranks in enumerate(plain[1:], 1):
        weight = weight_of(done, 1, SPAN)
        mean = mean * (1 - weight) + held_anchors(ranks)[0] * weight
    saved = averaged[0]["chosen"]
    np.testing.assert_allclose(saved, mean, rtol=0, atol=1e-12)
    assert not np.allclose(saved, plain[3][0]["chosen"], atol=1e-6)

    (candidate,) = averaged[0]["result"]["candidates"]
    assert candidate["validation_loss"] == pytest.approx(loss_of(saved), abs=1e-9)
    curve = [record["validation_loss"] for record in averaged[0]["records"]]
    assert curve[:2] == [record["validation_loss"] for record in plain[3][0]["records"][:2]], "one anchor by itself"
    assert curve[-1] == pytest.approx(loss_of(saved), abs=1e-9)


def loss_of(weights: np.ndarray[Any, Any]) -> float:
    """The loss of the anchor with which a run begins."""
    return run_ranks(begun_from, [0], weights)[0]


def begun_from(runtime: Any, weights: np.ndarray[Any, Any]) -> float:
    def prepare(pool: LocalPool) -> None:
        for trainer in pool.trainers.values():
            trainer.anchor.copy_(torch.from_numpy(weights))

    done = train_small_pool(
        runtime, *FOUR_TRAINERS, *ONE, "pool.workers_per_trainer=1", "budget=1rounds", prepare=prepare
    )
    return done["records"][0]["validation_loss"]


def merged(runtime: Any) -> dict[str, Any]:
    """The anchor and the average of a trainer that two have become, before its next round and after it."""
    seen: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def prepare(pool: LocalPool) -> None:
        form_all = pool.groups.form_all

        def after_merges(rank_sets: Any) -> None:
            (trainer,) = pool.trainers.values()
            assert trainer.mean_anchor is not None
            seen.append((trainer.anchor.numpy(force=True).copy(), trainer.mean_anchor.numpy(force=True).copy()))
            form_all(rank_sets)

        pool.groups.form_all = after_merges

    pair = ("pool.trainers=2", "pool.workers_per_trainer=1", "merge=worst_with_worst", "merge.every_rounds=2")
    done = train_small_pool(
        runtime, *FOUR_TRAINERS, *ONE, *pair, "budget=3rounds", f"outer.average_span={SPAN}", prepare=prepare
    )
    return {**done, "seen": seen}


def test_it_begins_anew_where_trainers_merge() -> None:
    ranks = run_ranks(merged, [0, 0])
    for rank in ranks:
        ((anchor, mean),) = rank["seen"]
        np.testing.assert_array_equal(mean, anchor)
        (last,) = rank["anchors"].values()
        weight = weight_of(4, 1, SPAN)  # two workers share the batch that each had
        expected = anchor * (1 - weight) + last * weight
        if rank["chosen"] is not None:
            np.testing.assert_allclose(rank["chosen"], expected, rtol=0, atol=1e-12)
