"""The average of a trainer's anchors (outer.average_span): what it is, and that nothing else changes."""

from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.averaging.anchors import average_in, weight_of
from adloco_dist.round.local_pool import LocalPool
from adloco_dist.testing.processes import run_ranks
from helpers.support import held_anchors, train_small_pool

SPAN = 0.4
ONE = ("pool.trainers=1", "pool.workers_per_trainer=2", "inner.schedule=constant", "inner.warmup_fraction=0",
       "inner.lr=1e-2", "evaluation.every_rounds=1")  # fmt: skip


def trained(rounds: int, *overrides: str) -> list[dict[str, Any]]:
    return run_ranks(train_small_pool, [0, 0], *ONE, f"budget.rounds={rounds}", *overrides)


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

    done = train_small_pool(runtime, *ONE, "pool.workers_per_trainer=1", "budget.rounds=1", prepare=prepare)
    return done["records"][0]["validation_loss"]
