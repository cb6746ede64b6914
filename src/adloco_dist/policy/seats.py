"""The reports of ranks that hold workers together, as the report of their seat: all that policies and records see."""

from collections.abc import Sequence

from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.report import (
    AnchorReport,
    EvaluationReport,
    InnerReport,
    MeasureReport,
    RankReport,
    TrainerReport,
    smallest_capacity,
    sums_by_update,
)


def seat_reports(reports: Sequence[RankReport], ranks_per_worker: int) -> list[RankReport]:
    """One report for each seat, numbered by it; of one rank each they are those that came.

    Every rank reports its part of losses, targets, norms and evaluations, which add up; a step takes as long as on the
    slowest rank.

    Args:
        reports: of all ranks, in their order.
    """
    if ranks_per_worker == 1:
        return list(reports)
    starts = range(0, len(reports), ranks_per_worker)
    return [_seat(number, reports[start : start + ranks_per_worker]) for number, start in enumerate(starts)]


def _seat(number: int, ranks: Sequence[RankReport]) -> RankReport:
    first = ranks[0]
    return RankReport(
        number,
        stop_requested=any(rank.stop_requested for rank in ranks),
        control_seconds=max(rank.control_seconds for rank in ranks),
        control_bytes_sent=sum(rank.control_bytes_sent for rank in ranks),
        checkpoint_seconds=max(rank.checkpoint_seconds for rank in ranks),
        plan_digest=first.plan_digest,
        merge=sum((rank.merge for rank in ranks[1:]), first.merge),
        capacity=smallest_capacity(rank.capacity for rank in ranks),
        is_writing=any(rank.is_writing for rank in ranks),
        resources={name: max(rank.resources.get(name, 0.0) for rank in ranks) for name in first.resources},
        update_seconds=max(rank.update_seconds for rank in ranks),
        notes=[note for rank in ranks for note in rank.notes],
        trainers={trainer: _trainer([rank.trainers[trainer] for rank in ranks]) for trainer in first.trainers},
    )


def _trainer(shares: Sequence[TrainerReport]) -> TrainerReport:
    first = shares[0]
    inner, outer = [share.inner for share in shares], [share.outer for share in shares]
    sums = [share.evaluation.sums for share in shares if share.evaluation.sums]
    return TrainerReport(
        first.num_workers,
        InnerReport(
            loss_sum=sum(one.loss_sum for one in inner),
            num_targets=sum(one.num_targets for one in inner),
            seconds=max(one.seconds for one in inner),
            data_seconds=max(one.data_seconds for one in inner),
            compute_seconds_per_sequence=max(one.compute_seconds_per_sequence for one in inner),
            step_losses=sums_by_update(one.step_losses for one in inner),
            notes=[note for one in inner for note in one.notes],
        ),
        MeasureReport(
            first.measure.statistics,
            max(share.measure.seconds for share in shares),
            sum(share.measure.bytes_sent for share in shares),
        ),
        OuterStepReport(
            num_finite=first.outer.num_finite,
            nonfinite=first.outer.nonfinite,
            pseudo_gradient_norm=sum(one.pseudo_gradient_norm**2 for one in outer) ** 0.5,
            seconds=max(one.seconds for one in outer),
            transfer_seconds=max(one.transfer_seconds for one in outer),
            wait_seconds=max(one.wait_seconds for one in outer),
            bytes_sent=sum(one.bytes_sent for one in outer),
            gradient_bytes_sent=sum(one.gradient_bytes_sent for one in outer),
        ),
        AnchorReport(
            [word for share in shares for word in share.anchor.checksum],
            all(share.anchor.is_finite for share in shares),
            first.anchor.position,
        ),
        EvaluationReport(sum(sums, Evaluation()) if sums else None, max(share.evaluation.seconds for share in shares)),
    )
