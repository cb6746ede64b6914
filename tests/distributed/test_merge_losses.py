"""What a merge costs or brings, as records tell it: the losses of its members and of their average."""

import pytest

from adloco_dist.messages import decode
from adloco_dist.run.rows import TrainerRow, merge_in_words
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, train_small_pool

PAIR = (
    "pool.trainers=2", "pool.workers_per_trainer=2", "merge=worst_with_worst", "merge.every_rounds=2",
    "budget=3rounds", "inner.lr=1e-2",
)  # fmt: skip


def test_records_hold_what_members_and_their_average_come_to() -> None:
    """The members stand where the round before has left them; the average is evaluated before it is trained on."""
    records = run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *PAIR, "evaluation.every=1rounds")[0]["records"]
    (merged,) = [record for record in records if "merge" in record]
    before = {record["trainer"]: record["validation_loss"] for record in records if record["round"] == 2}
    assert merged["round"] == 3
    found = merged["merge"]["member_losses"]
    assert {int(member): loss for member, loss in found.items()} == pytest.approx(before, abs=1e-12)
    after = merged["merge"]["loss"]
    assert after not in before.values()
    assert abs(after - merged["validation_loss"]) > 1e-6, "before it is trained on"
    assert f"of their average {after:.4f}" in merge_in_words(decode(TrainerRow, merged))


def test_where_no_curves_are_drawn_merges_evaluate_nothing() -> None:
    records = run_ranks(train_small_pool, [0, 0], *FOUR_TRAINERS, *PAIR, "evaluation.every=null")[0]["records"]
    (merged,) = [record for record in records if "merge" in record]
    assert merged["merge"]["loss"] is None
    assert "average" not in merge_in_words(decode(TrainerRow, merged)).split("; ")[-1].replace("average together", "")
