"""What a run leaves: the best trainer or the average of all."""

import numpy as np
from support import held_anchors, train_poisoned_pool, train_small_pool

from adloco_dist.decisions.records import candidate_name
from adloco_dist.testing.processes import run_ranks

POOL = ("pool.trainers=3", "pool.workers_per_trainer=2", "budget.rounds=2", "inner.lr=5e-3")


def test_the_average_of_the_trainers_left_can_be_saved() -> None:
    overrides = (*POOL, "merge=none", "final=average")
    ranks = run_ranks(train_small_pool, [0, 0, 1], *overrides)
    result, held = ranks[0]["result"], held_anchors(ranks)
    assert result["saved"] == "average of all trainers"
    assert [candidate["name"] for candidate in result["candidates"]] == [*map(candidate_name, held), result["saved"]]
    np.testing.assert_allclose(ranks[0]["chosen"], np.mean(list(held.values()), axis=0), atol=1e-12)


def test_a_trainer_that_is_not_finite_is_in_no_average() -> None:
    ranks = run_ranks(train_poisoned_pool, [0, 0], *POOL, "merge=none", "final=average")
    held = held_anchors(ranks)
    assert not np.isfinite(held[1]).all()
    np.testing.assert_allclose(ranks[0]["chosen"], (held[0] + held[2]) / 2, atol=1e-12)
