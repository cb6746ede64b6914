"""Trainers at different rates, of which merge=halving leaves the best: rates that they learn at, and who is left."""

from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.policy.schedule import rate_over_a_part
from adloco_dist.pool.local_pool import LocalPool
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, held_anchors, train_small_pool

RATES = (0.5, 1.0, 2.0, 4.0)
HALVING = ("merge=halving", "merge.rungs=[0.25,0.5]", "pool.rates=[0.5,4]", "budget=16rounds", "evaluation.every=null")


def test_every_worker_learns_at_its_trainers_rate() -> None:
    """A worker's one update of SGD is its rate times its gradient, which is the same for all in the first round."""
    plain = ("inner=sgd", "inner.momentum=0", "inner.clip_norm=null", "inner.lr=1e-2", "inner.schedule=constant",
             "algorithm.updates_per_round=1", "data.shards=shared", "budget=1rounds")  # fmt: skip
    overrides = (*FOUR_TRAINERS, *plain, "pool.rates=[0.5,4]", "outer=average", "inner.weight_decay=0")
    apart = run_ranks(train_small_pool, [0, 0], *overrides)
    norms = {row["trainer"]: row["pseudo_gradient_norm"] for row in apart[0]["records"] if row["round"]}
    same = run_ranks(train_small_pool, [0, 0], *overrides, "pool.rates=null")
    alike = {row["trainer"]: row["pseudo_gradient_norm"] for row in same[0]["records"] if row["round"]}
    for trainer, rate in enumerate(RATES):
        assert norms[trainer] == pytest.approx(rate * alike[trainer], rel=1e-6)
    assert [row["rate_factor"] for row in apart[0]["records"] if row["round"]] == [0.5, 1.0, 2.0, 4.0]


def followed(runtime: Any, *overrides: str) -> dict[str, Any]:
    """A run, and after every merge whether the workers here stand where their trainer's anchor is."""
    seen: list[bool] = []

    def prepare(pool: LocalPool) -> None:
        form_all = pool.groups.form_all

        def after_merges(rank_sets: Any) -> None:
            trainers = pool.trainers.values()
            seen.extend(torch.equal(worker.weights, one.anchor) for one in trainers for worker in one.workers)
            form_all(rank_sets)

        pool.groups.form_all = after_merges

    return {**train_small_pool(runtime, *overrides, prepare=prepare), "at_anchor": seen}


def test_the_best_trainer_is_left_with_all_workers_and_its_own_rate() -> None:
    ranks = run_ranks(followed, [0, 0], *FOUR_TRAINERS, *HALVING)
    rows = [row for row in ranks[0]["records"] if row["round"]]
    merges = [row["merge"] for row in rows if "merge" in row]
    assert [len(merge["candidates"]) for merge in merges] == [2, 2, 2]
    for merge in merges:
        shares, losses = merge["shares"], {who: one["validation_loss"] for who, one in merge["candidates"].items()}
        (ended,) = (who for who, share in shares.items() if share == 0)
        assert losses[ended] == max(losses.values())
        assert shares[str(merge["survivor"])] == 1, "the weights of the other count for nothing"
    (left,) = held_anchors(ranks)
    assert rows[-1]["workers"] == 4
    assert rows[-1]["rate_factor"] == pytest.approx(RATES[left])
    assert rows[0]["rate_factor"] == pytest.approx(RATES[0] * rate_over_a_part(0.5))
    assert all(all(rank["at_anchor"]) for rank in ranks)
    assert np.isfinite(ranks[0]["result"]["candidates"][0]["validation_loss"])
