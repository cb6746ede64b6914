"""Where workers are hosted changes nothing, and all ranks of a trainer hold one anchor."""

from typing import Any

import numpy as np
import pytest

from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, held_anchors, train_small_pool

EIGHT_WORKERS = ("pool.trainers=4", "pool.workers_per_trainer=2", "algorithm=diloco", "inner.warmup_fraction=0.3")
ROUNDS = "budget=6rounds"


def run(nodes: list[int], *overrides: str) -> list[dict[str, Any]]:
    return run_ranks(train_small_pool, nodes, *FOUR_TRAINERS, *EIGHT_WORKERS, *overrides)


@pytest.fixture(scope="module")
def on_one_rank() -> list[dict[str, Any]]:
    return run([0], ROUNDS)


@pytest.mark.parametrize(
    ("nodes", "overrides"),
    [
        ([0, 0], ()),
        ([0, 1], ("pool.placement=spread",)),
        ([0, 0, 0, 0], ()),
        ([0, 0, 1, 1], ("pool.placement=spread",)),
        ([0, 0, 0, 0, 1, 1, 1, 1], ()),
        ([0, 0, 1], ()),
    ],
)
def test_the_same_experiment_on_any_ranks_is_the_same_run(
    on_one_rank: list[dict[str, Any]], nodes: list[int], overrides: tuple[str, ...]
) -> None:
    elsewhere = run(nodes, ROUNDS, *overrides)
    expected = held_anchors(on_one_rank)
    for trainer, anchor in held_anchors(elsewhere).items():
        np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-9)
        assert not np.array_equal(anchor, expected[(trainer + 1) % 4]), "trainers learn apart"
    for mine, theirs in zip(on_one_rank[0]["records"], elsewhere[0]["records"], strict=True):
        for key in ("round", "trainer", "workers", "tokens", "pool_tokens", "cursor"):
            assert mine.get(key) == theirs.get(key)
        for key in ("train_loss", "validation_loss", "pseudo_gradient_norm"):
            assert mine.get(key) == pytest.approx(theirs.get(key), abs=1e-9)
    for mine, theirs in zip(on_one_rank[0]["result"]["candidates"], elsewhere[0]["result"]["candidates"], strict=True):
        assert mine["validation_loss"] == pytest.approx(theirs["validation_loss"], abs=1e-9)
    assert on_one_rank[0]["result"]["saved"] == elsewhere[0]["result"]["saved"]


def test_with_muon_too() -> None:
    """Its momentum is a worker's own, and a worker on any rank."""
    muon = ("inner=muon", "inner.lr=1e-2")
    expected = held_anchors(run([0], ROUNDS, *muon))
    for nodes in ([0, 0, 0], [0, 0, 1, 1]):
        for trainer, anchor in held_anchors(run(nodes, ROUNDS, *muon, "pool.placement=spread")).items():
            np.testing.assert_allclose(anchor, expected[trainer], rtol=0, atol=1e-9)


def test_float32_agrees_over_one_round(on_one_rank: list[dict[str, Any]]) -> None:
    alone = held_anchors(run([0], "precision=fp32", "budget=1rounds"))
    spread = held_anchors(run([0, 1, 2, 3], "precision=fp32", "budget=1rounds", "pool.placement=spread"))
    for trainer, anchor in spread.items():
        np.testing.assert_allclose(anchor, alone[trainer], rtol=0, atol=1e-6)


def test_ddp_with_any_capacity_is_the_same_run() -> None:
    """Gradients accumulated over passes and averaged once equal those of one pass."""
    ddp = (
        *FOUR_TRAINERS,
        "algorithm=ddp",
        "pool.trainers=1",
        "pool.workers_per_trainer=null",
        "batching.local_batch=3",
    )
    whole, parts = (run_ranks(train_small_pool, [0, 0], *ddp, *more) for more in ((), ("batching.capacity=2",)))
    np.testing.assert_allclose(held_anchors(whole)[0], held_anchors(parts)[0], rtol=0, atol=1e-9)


def test_training_learns_and_the_chosen_weights_reach_rank_0() -> None:
    ranks = run([0, 0, 0, 0], "budget=15rounds", "inner.lr=1e-2")
    first, last = ranks[0]["records"][0], ranks[0]["result"]["candidates"]
    assert min(candidate["validation_loss"] for candidate in last) < 0.8 * first["validation_loss"]
    best = ranks[0]["result"]["trainer"]
    np.testing.assert_array_equal(ranks[0]["chosen"], held_anchors(ranks)[best])
