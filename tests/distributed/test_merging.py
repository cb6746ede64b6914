"""Trainers that merge and ranks that regroup, on real process groups: invariants 1, 3, 4 and 7 through merges."""

from typing import Any

import numpy as np
import pytest
from support import train_small_pool

from adloco_dist.testing.processes import run_ranks

SHRINKING = (
    "pool.trainers=4", "pool.workers_per_trainer=2", "merge=worst_with_worst", "merge.every_rounds=2",
    "budget.rounds=9", "batching.request=norm_test", "batching.eta=0.7", "inner.lr=5e-3", "evaluation.every_rounds=1",
)  # fmt: skip
DECIDED = ("round", "trainer", "workers", "total_batch", "cursor", "tokens", "pool_tokens", "merge", "origins")


def anchors(ranks: list[dict[str, Any]]) -> dict[int, np.ndarray]:
    """Every trainer's anchor, after a check that all its ranks hold the same bits (invariant 3)."""
    held: dict[int, np.ndarray] = {}
    for rank in ranks:
        for trainer, anchor in rank["anchors"].items():
            assert np.array_equal(held.setdefault(trainer, anchor), anchor), f"trainer {trainer}"
    return held


def decided(record: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on hosting."""
    told = {key: record.get(key) for key in DECIDED}
    if told["merge"]:
        shares = {member: round(share, 9) for member, share in told["merge"]["shares"].items()}
        told["merge"] = {"survivor": told["merge"]["survivor"], "shares": shares}
    return told


@pytest.mark.parametrize("freed", ["join", "retire", "redistribute"])
def test_a_shrinking_pool_on_any_ranks_is_the_same_run(freed: str) -> None:
    """4 -> 3 -> 2 -> 1 trainers."""
    overrides = (*SHRINKING, f"merge.freed={freed}")
    alone = run_ranks(train_small_pool, [0], *overrides)
    counts = [sum(record["round"] == round_ for record in alone[0]["records"]) for round_ in range(10)]
    assert counts == [4, 4, 4, 3, 3, 2, 2, 1, 1, 1]
    (expected,) = anchors(alone).values()
    for nodes, placement in (([0, 0], "pack"), ([0, 0, 1, 1], "spread"), ([0, 0, 0, 0], "pack")):
        elsewhere = run_ranks(train_small_pool, nodes, *overrides, f"pool.placement={placement}")
        (anchor,) = anchors(elsewhere).values()
        np.testing.assert_allclose(anchor, expected, rtol=0, atol=1e-9)
        for mine, theirs in zip(alone[0]["records"], elsewhere[0]["records"], strict=True):
            assert decided(mine) == decided(theirs)
            assert mine.get("train_loss") == pytest.approx(theirs.get("train_loss"), abs=1e-9)
