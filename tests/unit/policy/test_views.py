"""What policies see of a trainer, from reports to the choice of a merge."""

from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.config.compose import compose
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Network
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import EvaluationReport, InnerReport, RankReport, TrainerReport
from adloco_dist.policy.summary import pool_report

INPUTS = PlanInputs(
    Layout.one_rank_per_worker({0: (0, 1), 1: (1, 2), 2: (2, 2)}),
    network=Network(nodes=[0, 1, 2], bytes_per_second={(0, 1): 5e6, (1, 2): 3e6, (0, 2): 1e6}),
)
SETTINGS = compose(
    ["pool.trainers=3", "batching.local_batch=2", "batching.request=none", "data.sequence_length=10",
     "algorithm.updates_per_round=5", "merge.policy=worst_loss_with_best", "merge.every_rounds=1", "merge.width=2"]
)  # fmt: skip


def merged(*reports: RankReport) -> RoundPlan:
    first = plan_round(SETTINGS, INPUTS, None, PoolReport())
    return plan_round(SETTINGS, INPUTS, first, pool_report(reports, first, 1.0))


def share(train_loss: float, validation: Evaluation | None = None, num_workers: int = 1) -> TrainerReport:
    return TrainerReport(
        num_workers,
        InnerReport(train_loss * num_workers),
        outer=OuterStepReport(2),
        evaluation=EvaluationReport(validation),
    )


def test_a_policy_by_loss_sees_the_losses_of_all_ranks_of_a_trainer() -> None:
    plan = merged(
        RankReport(0, trainers={0: share(3.0)}),
        RankReport(1, trainers={0: share(5.0), 1: share(1.0)}),
        RankReport(2, trainers={1: share(2.0), 2: share(3.0, num_workers=2)}),
    )
    merge = plan.merge
    assert merge
    assert (merge.survivor, merge.ended) == (1, [0])
    view = merge.candidates[0]
    assert (view.train_loss, view.validation_loss, view.tokens) == (4.0, None, 5 * 4 * 10)
    assert (view.ranks, view.link_bytes_per_second) == ((0, 1), 5e6)


def test_validation_losses_decide_where_all_were_evaluated() -> None:
    plan = merged(
        RankReport(0, trainers={0: share(3.0, Evaluation(10.0, 10))}),
        RankReport(1, trainers={0: share(5.0, Evaluation(30.0, 10)), 1: share(1.0, Evaluation(30.0, 10))}),
        RankReport(2, trainers={1: share(2.0), 2: share(3.0, Evaluation(40.0, 10), num_workers=2)}),
    )
    merge = plan.merge
    assert merge
    assert (merge.survivor, merge.ended) == (0, [2])
    assert merge.candidates[0].validation_loss == 2.0


def test_the_slowest_link_inside_a_trainer() -> None:
    assert INPUTS.network.slowest_link([0, 1, 2]) == 1e6
    assert INPUTS.network.slowest_link([1, 1]) is None, "one node has no link"
    assert Network([0, 1, 2], {(0, 1): 5e6}).slowest_link([0, 1, 2]) is None, "not all links were measured"
    assert Network().slowest_link([0, 5]) is None
