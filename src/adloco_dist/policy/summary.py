"""What the reports of a round come to: seat by seat, trainer by trainer, and what the next plan needs to know."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from adloco_dist.policy.batch import BatchReport
from adloco_dist.policy.evaluation import total
from adloco_dist.policy.link import RoundCost, drift_factor, remembered
from adloco_dist.policy.passes import Passes
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.report import (
    InnerReport,
    MeasureReport,
    RankReport,
    TrainerReport,
    smallest_capacity,
    sums_by_update,
)
from adloco_dist.text import ranks_by_value

Shares = list[tuple[RankReport, TrainerReport]]
"""The reports of a trainer's ranks, each with the trainer's share in it."""


def seat_reports(reports: Sequence[RankReport], ranks_per_worker: int) -> list[RankReport]:
    """One report for each seat, which is all that policies and records see of ranks that hold a worker together.

    Every rank reports its part of losses, targets, norms and evaluations, which add up; a step takes as long as on the
    slowest rank. The reports are those of all ranks, in their order.
    """
    if ranks_per_worker == 1:
        return list(reports)
    starts = range(0, len(reports), ranks_per_worker)
    return [_seat(number, reports[start : start + ranks_per_worker]) for number, start in enumerate(starts)]


def _seat(number: int, ranks: Sequence[RankReport]) -> RankReport:
    first = ranks[0]
    return replace(
        first,
        rank=number,
        control_seconds=max(rank.control_seconds for rank in ranks),
        control_bytes_sent=sum(rank.control_bytes_sent for rank in ranks),
        checkpoint_seconds=max(rank.checkpoint_seconds for rank in ranks),
        merge=sum((rank.merge for rank in ranks[1:]), first.merge),
        capacity=smallest_capacity(rank.capacity for rank in ranks),
        is_writing=any(rank.is_writing for rank in ranks),
        resources={name: max(rank.resources.get(name, 0.0) for rank in ranks) for name in first.resources},
        update_seconds=max(rank.update_seconds for rank in ranks),
        notes=[note for rank in ranks for note in rank.notes],
        trainers={trainer: _of_seat([rank.trainers[trainer] for rank in ranks]) for trainer in first.trainers},
    )


def _of_seat(parts: Sequence[TrainerReport]) -> TrainerReport:
    """A trainer's share of a seat's round, from those of its ranks."""
    first, inner, outer = parts[0], [part.inner for part in parts], [part.outer for part in parts]
    return replace(
        first,
        inner=replace(
            first.inner,
            loss_sum=sum(part.loss_sum for part in inner),
            num_targets=sum(part.num_targets for part in inner),
            seconds=max(part.seconds for part in inner),
            data_seconds=max(part.data_seconds for part in inner),
            passes=_slowest(inner),
            step_losses=sums_by_update(part.step_losses for part in inner),
            notes=[note for part in inner for note in part.notes],
        ),
        measure=replace(
            first.measure,
            seconds=max(part.measure.seconds for part in parts),
            bytes_sent=sum(part.measure.bytes_sent for part in parts),
        ),
        outer=dataclasses.replace(
            first.outer,
            pseudo_gradient_norm=sum(part.pseudo_gradient_norm**2 for part in outer) ** 0.5,
            seconds=max(part.seconds for part in outer),
            transfer_seconds=max(part.transfer_seconds for part in outer),
            wait_seconds=max(part.wait_seconds for part in outer),
            bytes_sent=sum(part.bytes_sent for part in outer),
            gradient_bytes_sent=sum(part.gradient_bytes_sent for part in outer),
        ),
        anchor=replace(
            first.anchor,
            checksum=[word for part in parts for word in part.anchor.checksum],
            is_finite=all(part.anchor.is_finite for part in parts),
        ),
        evaluation=replace(
            first.evaluation,
            sums=total(part.evaluation.sums for part in parts),
            seconds=max(part.evaluation.seconds for part in parts),
        ),
    )


def _slowest(parts: Sequence[InnerReport]) -> list[Passes]:
    """The passes of the rank that they took longest."""
    return max((part.passes for part in parts), key=lambda passes: sum(one.seconds for one in passes))


def disagreements(reports: Sequence[RankReport], ranks_per_worker: int = 1) -> list[str]:
    """Why ranks must not continue: they hold different anchors of a trainer, or acted on different plans. Each of the
    ranks that hold a worker together has another part of the anchor."""
    errors = []
    for trainer, parts in sorted(shares_by_trainer(reports).items()):
        for shard in range(ranks_per_worker):
            same = [(rank.rank, share) for rank, share in parts if rank.rank % ranks_per_worker == shard]
            groups = ranks_by_value([(rank, tuple(share.anchor.checksum)) for rank, share in same])
            if len(groups) > 1:
                errors.append(f"the anchor of trainer {trainer} differs between {' and '.join(groups.values())}")
    groups = ranks_by_value([(report.rank, report.plan_digest) for report in reports])
    if len(groups) > 1:
        errors.append(f"another plan was acted on by {' and by '.join(groups.values())}")
    return errors


def pool_report(
    reports: Sequence[RankReport],
    plan: RoundPlan | None,
    seconds: float,
    round_seconds: float = 0.0,
    errors: Sequence[str] = (),
) -> PoolReport:
    """What a later plan needs to know.

    Args:
        reports: of all seats.
        plan: that of the round which the reports are about; None for the state before training.
        seconds: rank 0's clock at the end of the round, since the first one began.
        round_seconds: what the round took of them.
    """
    shares = shares_by_trainer(reports)
    cost = _round_cost(reports, plan) if plan else None
    moved = _trainers_with(shares, lambda part: len(part.outer.nonfinite) < part.num_workers)
    return PoolReport(
        seconds=seconds,
        round_seconds=round_seconds,
        updates=plan.updates if plan else 0,
        probed=plan.probed if plan else (),
        errors=list(errors),
        batches=_batch_reports(reports, shares, plan, cost) if plan else {},
        train_loss={trainer: train_loss(parts) for trainer, parts in shares.items()} if plan else {},
        validation_loss={
            trainer: evaluation.loss
            for trainer, parts in shares.items()
            if (evaluation := total(part.evaluation.sums for _, part in parts))
        },
        not_finite=_trainers_with(shares, lambda part: not part.anchor.is_finite),
        nonfinite=_trainers_with(shares, lambda part: bool(part.outer.nonfinite)),
        outer_steps=len(moved) if plan else 0,
        capacities=[report.capacity for report in reports],
        cost=cost,
        is_writing=any(report.is_writing for report in reports),
    )


def _round_cost(reports: Sequence[RankReport], plan: RoundPlan) -> RoundCost | None:
    """The cost of a round that all ranks took as a whole, on the rank that waited least."""
    busy = [report for report in reports if report.trainers]
    if not busy or not all(report.update_seconds for report in busy):
        return None
    steps = [[share.outer for share in report.trainers.values()] for report in busy]
    return RoundCost(
        update_seconds=max(report.spent("inner") for report in busy) / plan.updates,
        exposed_seconds=min(report.control_seconds + report.spent("outer") for report in busy),
        transfer_seconds=min(sum(step.transfer_seconds for step in own) for own in steps),
        wait_seconds=min(sum(step.wait_seconds for step in own) for own in steps),
        turn_seconds=tuple(
            report.update_seconds * sum(share.num_workers for share in report.trainers.values()) for report in reports
        ),
        four_bits_share=plan.arriving_four_bits_share,
    )


def _trainers_with(shares: Mapping[int, Shares], holds: Callable[[TrainerReport], bool]) -> frozenset[int]:
    """The trainers of which at least one rank's share fulfils a condition."""
    return frozenset(trainer for trainer, parts in shares.items() if any(holds(part) for _, part in parts))


def _batch_reports(
    reports: Sequence[RankReport], shares: Mapping[int, Shares], plan: RoundPlan, cost: RoundCost | None
) -> dict[int, BatchReport]:
    if cost:
        # As in most of the last rounds: one in which gradients are measured sends more, and not every one does.
        exposed = median(one.exposed_seconds for one in remembered(plan.costs, cost))
        usual = dataclasses.replace(cost, exposed_seconds=exposed)
        seconds, exposed_share = usual.seconds(plan.updates), usual.exposed_share(plan.updates)
    else:  # an evaluation belongs to no update
        seconds = max(report.control_seconds + report.spent("inner", "measure", "outer") for report in reports)
        exposed_share = None
    return {
        trainer: BatchReport(
            statistics=measured(parts).statistics,
            is_measured=plan.measures,
            local_batch=plan.batches[trainer].local_batch,
            passes=_slowest([share.inner for _, share in parts]),
            seconds_per_update=seconds / plan.updates,
            exposed_share=exposed_share,
            drift_factor=drift_factor(plan.rhythm),
        )
        for trainer, parts in shares.items()
    }


def shares_by_trainer(reports: Sequence[RankReport]) -> dict[int, Shares]:
    """Every trainer's ranks, in the order of the reports."""
    shares: dict[int, Shares] = {}
    for report in reports:
        for trainer, share in report.trainers.items():
            shares.setdefault(trainer, []).append((report, share))
    return shares


def train_loss(shares: Shares) -> float:
    """Mean loss of the trainer's workers over the round, in nats per target."""
    return sum(share.inner.loss_sum for _, share in shares) / sum(share.num_workers for _, share in shares)


def step_losses(shares: Shares, worker_updates: Sequence[int]) -> list[float]:
    """Mean loss of each update over the workers that took it, by the updates of each worker; NaN if unknown."""
    sums = sums_by_update(share.inner.step_losses for _, share in shares)
    return [total / sum(taken > update for taken in worker_updates) for update, total in enumerate(sums)]


def measured(shares: Shares) -> MeasureReport:
    """What the trainer's lowest rank measured; nothing, where no rank did."""
    return next((share.measure for _, share in shares if share.measure.statistics), MeasureReport())
