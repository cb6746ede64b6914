"""What a run leaves: the best trainer or the average of all."""

from typing import Any

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy.evaluation import candidate_name
from adloco_dist.pool.local_pool import LocalPool
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, held_anchors, train_poisoned_pool, train_small_pool

POOL = ("pool.trainers=3", "pool.workers_per_trainer=2", "budget=2rounds", "inner.lr=5e-3")


def test_the_average_of_the_trainers_left_can_be_saved() -> None:
    overrides = (*POOL, "merge=none", "final=average")
    ranks = run_ranks(train_small_pool, [0, 0, 1], *FOUR_TRAINERS, *overrides)
    result, held = ranks[0]["result"], held_anchors(ranks)
    assert result["saved"] == "average of all trainers"
    assert [candidate["name"] for candidate in result["candidates"]] == [*map(candidate_name, held), result["saved"]]
    np.testing.assert_allclose(ranks[0]["chosen"], np.mean(list(held.values()), axis=0), atol=1e-12)


def test_a_trainer_that_is_not_finite_is_in_no_average() -> None:
    ranks = run_ranks(train_poisoned_pool, [0, 0], *FOUR_TRAINERS, *POOL, "merge=none", "final=average")
    held = held_anchors(ranks)
    assert not np.isfinite(held[1]).all()
    np.testing.assert_allclose(ranks[0]["chosen"], (held[0] + held[2]) / 2, atol=1e-12)


def train_without_end(runtime: Runtime, final: str) -> dict[str, Any]:
    """With anchors of which none is finite."""

    def poison(pool: LocalPool) -> None:
        for trainer in pool.trainers.values():
            trainer.anchor[3] = float("nan")

    return train_small_pool(
        runtime, *FOUR_TRAINERS, *POOL, "merge=none", f"final={final}", "evaluation.every=null", prepare=poison
    )


@pytest.mark.parametrize("final", ["best", "average"])
def test_of_trainers_that_are_all_not_finite_none_is_chosen(final: str) -> None:
    for rank in run_ranks(train_without_end, [0, 0], final):
        assert rank["chosen"] is None
        if rank["result"] is not None:
            assert (rank["result"]["saved"], rank["result"]["trainer"]) == (None, None)
            assert len(rank["result"]["candidates"]) == 3
