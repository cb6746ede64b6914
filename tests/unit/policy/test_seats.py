"""Ranks that hold a worker together, seen as one: their reports, their nodes, and what they must agree on."""

import pytest

from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.config import SettingsError
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import Layout, seat_nodes
from adloco_dist.policy.report import (
    AnchorReport,
    EvaluationReport,
    InnerReport,
    RankReport,
    TrainerReport,
)
from adloco_dist.policy.summary import disagreements, seat_reports


def report(rank: int, checksum: int, loss: float, norm: float, **fields: object) -> RankReport:
    share = TrainerReport(
        1,
        InnerReport(loss, num_targets=3, seconds=float(rank)),
        outer=OuterStepReport(num_finite=2, pseudo_gradient_norm=norm, bytes_sent=10),
        anchor=AnchorReport([checksum, 1], is_finite=rank != 3),
        evaluation=EvaluationReport(Evaluation(loss, 2)),
    )
    return RankReport(rank, trainers={0: share}, plan_digest="a", **fields)  # pyright: ignore[reportArgumentType]


def four() -> list[RankReport]:
    return [
        report(0, 7, 1.0, 3.0, capacity=8, resources={"memory": 1.0}),
        report(1, 8, 0.5, 4.0, capacity=6, resources={"memory": 2.0}),
        report(2, 7, 2.0, 0.0),
        report(3, 8, 1.0, 1.0, notes=["slow"]),
    ]


def test_parts_add_up_and_the_slowest_rank_counts() -> None:
    first, second = seat_reports(four(), 2)
    assert (first.rank, second.rank) == (0, 1)
    share = first.trainers[0]
    assert (share.inner.loss_sum, share.inner.num_targets, share.inner.seconds) == (1.5, 6, 1.0)
    assert share.outer.pseudo_gradient_norm == 5.0
    assert (share.outer.num_finite, share.outer.bytes_sent) == (2, 20)
    assert share.evaluation.sums == Evaluation(1.5, 4)
    assert (first.capacity, first.resources) == (6, {"memory": 2.0})
    assert (second.capacity, second.notes) == (None, ["slow"])
    assert first.trainers[0].anchor.is_finite
    assert not second.trainers[0].anchor.is_finite


def test_a_rank_that_holds_a_worker_by_itself_reports_as_it_is() -> None:
    reports = four()
    assert seat_reports(reports, 1) == reports


def test_ranks_with_the_same_part_must_hold_the_same() -> None:
    reports = four()
    assert disagreements(reports, 2) == []
    assert disagreements(reports, 1) == ["the anchor of trainer 0 differs between ranks {0,2} and ranks {1,3}"]
    reports[3].trainers[0].anchor = AnchorReport([9, 1])
    assert disagreements(reports, 2) == ["the anchor of trainer 0 differs between rank 1 and rank 3"]


def test_the_ranks_of_a_seat() -> None:
    assert Layout.one_rank_per_worker({0: [0, 1], 2: [1]}).in_ranks(2).workers == {0: ((0, 1), (2, 3)), 2: ((2, 3),)}
    assert list(seat_nodes([0, 0, 0, 0, 1, 1], 2)) == [0, 0, 1]
    with pytest.raises(SettingsError, match=r"ranks_per_worker=4: 6 ranks are no multiple of it; start 8, or"):
        seat_nodes([0] * 6, 4)
    with pytest.raises(SettingsError, match=r"=2: ranks 2 to 3 stand on nodes 0, 1; .* a multiple of 2 ranks on each"):
        seat_nodes([0, 0, 0, 1, 1, 1], 2)
