"""How reports and plans add up to the rows of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from typing import Any

from adloco_dist.config import Settings
from adloco_dist.policy.evaluation import Evaluation, total
from adloco_dist.policy.layout import ranks_of_seat
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import RankReport, TrainerReport, smallest_capacity
from adloco_dist.policy.schedule import rate_of_update
from adloco_dist.policy.summary import Shares, measured, shares_by_trainer, step_losses, train_loss
from adloco_dist.run.rows import TrainerRow


def round_rows(
    settings: Settings,
    plan: RoundPlan | None,
    next_plan: RoundPlan,
    reports: Sequence[RankReport],
    elapsed_seconds: float,
    worker_lr: float,
) -> list[TrainerRow]:
    """One row for each trainer.

    Args:
        plan: that of the round that the reports are about; None for the state before training.
        next_plan: what was decided from the reports: it holds the statistics smoothed over this round.
        reports: those of all seats; figures of a seat of several ranks are under its lowest rank.
        elapsed_seconds: rank 0's clock at the end of the round.
        worker_lr: the peak rate of one worker alone.
    """
    by_trainer, size = shares_by_trainer(reports), settings.pool.ranks_per_worker
    rows = [_row(settings, plan, trainer, by_trainer[trainer]) for trainer in sorted(by_trainer)]
    for row in rows:
        row.elapsed_seconds = round(elapsed_seconds, 6)
        if plan:
            rate = rate_of_update(settings, row.workers or 1, plan.rhythm, plan.progress, plan.updates - 1)
            row.learning_rate = float(f"{rate * worker_lr:.6g}")
        if plan and plan.merge and row.trainer == plan.merge.survivor:
            cost = reduce(add, (report.merge for report in reports))
            losses = {member: _loss(cost.members.get(member)) for member in plan.merge.shares}
            row.merge = replace(plan.merge, member_losses=losses, loss=_loss(cost.merged))
            row.seconds["merge"] = max(rank.merge.seconds for rank, _ in by_trainer[row.trainer])
            row.bytes_sent["merge"] = cost.bytes_sent
        if plan and settings.batching.measures_gradients:
            found = measured(by_trainer[row.trainer])
            row.statistics = asdict(found.statistics) if found.statistics else None
            row.shared_squared_norm = found.shared_squared_norm
            if (batch := next_plan.batches.get(row.trainer)) and (smoothed := batch.smoothed.statistics):
                row.smoothed, row.noise_scale = asdict(smoothed), smoothed.noise_scale
    if plan:  # a rank's own notes belong to no trainer in particular
        rows[0].notes += [f"rank {size * seat.rank}: {note}" for seat in reports for note in seat.notes]
    return rows


def _row(settings: Settings, plan: RoundPlan | None, trainer: int, shares: Shares) -> TrainerRow:
    """A trainer's row, as far as its own ranks know it."""
    reports, size = [share for _, share in shares], settings.pool.ranks_per_worker
    seconds = _by_key([share.seconds for share in reports], max)
    seconds["control"] = max(rank.control_seconds for rank, _ in shares)
    bytes_sent = _by_key([share.bytes_sent for share in reports], sum)
    bytes_sent["control"] = sum(_control_bytes(rank, trainer) for rank, _ in shares)
    evaluation = total(share.evaluation.sums for share in reports)
    trained = _trained(settings, plan, trainer, shares) if plan else {}
    return TrainerRow(
        round=plan.round + 1 if plan else 0,
        trainer=trainer,
        ranks=[rank for seat, _ in shares for rank in ranks_of_seat(seat.rank, size)],
        workers=sum(share.num_workers for share in reports),
        cursor=reports[0].anchor.position,
        seconds=seconds,
        bytes_sent=bytes_sent,
        **(evaluation.figures() if evaluation else {}),
        **trained,
    )


def _trained(settings: Settings, plan: RoundPlan, trainer: int, shares: Shares) -> dict[str, Any]:
    """The fields of a round: what was trained, and why the batch was what it was."""
    reports, size = [share for _, share in shares], settings.pool.ranks_per_worker
    batch, sequences = plan.batches[trainer], plan.sequences(trainer)
    worker_updates = list(plan.updates_of_workers(trainer))
    capacity = smallest_capacity(rank.capacity for rank, _ in shares)
    passes = -(-batch.local_batch // (capacity or batch.local_batch))
    notes = [f"rank {size * seat.rank}: {note}" for seat, share in shares for note in share.inner.notes]
    return {
        "plan": shares[0][0].plan_digest,
        "updates": plan.updates,
        "delay_updates": plan.rhythm.delay_updates,
        "in_four_bits": plan.rhythm.in_four_bits,
        "worker_updates": worker_updates,
        "sequences": sequences,
        "tokens": sequences * settings.data.sequence_length,
        "targets": sum(share.inner.num_targets for share in reports),
        "data_seconds": max(share.inner.data_seconds for share in reports),
        "resources": {size * seat.rank: seat.resources for seat, _ in shares},
        "pool_tokens": plan.pool_tokens + plan.round_tokens,
        "total_batch": plan.total_batch(trainer),
        "local_batch": batch.local_batch,
        "request": batch.request,
        "bounded_request": batch.bounded,
        "bound": batch.bound,
        "mode": batch.mode,
        "batch_limit": batch.batch_limit,
        "switch_n": batch.switch_n,
        "worth": batch.worth,
        "micro_batch": -(-batch.local_batch // passes),
        "passes": passes,
        "notes": [batch.note, *notes] if batch.note else notes,
        "train_loss": train_loss(shares),
        "step_losses": step_losses(shares, worker_updates) if settings.run.step_losses else [],
        "finite_workers": sum(share.num_workers - len(share.outer.nonfinite) for share in reports),
        "nonfinite_workers": sorted(worker for share in reports for worker in share.outer.nonfinite),
        # Unknown as well where the average was completed before the run was stopped, and resumed after it.
        "pseudo_gradient_norm": reports[0].outer.pseudo_gradient_norm or None,
        "utilisation": {size * seat.rank: seat.utilisation for seat, _ in shares},
        "rank_seconds": {size * seat.rank: _rank_seconds(seat, share) for seat, share in shares},
    }


def _rank_seconds(rank: RankReport, share: TrainerReport) -> dict[str, float]:
    """Where a rank's round went, by step.

    What concerns all trainers on the rank (`control`, `merge`, `checkpoint`) is the same in the row of each.
    """
    steps = {
        **share.seconds,
        "control": rank.control_seconds,
        "merge": rank.merge.seconds,
        "checkpoint": rank.checkpoint_seconds,
        "wait": share.outer.wait_seconds,
        "transfer": share.outer.transfer_seconds,
    }
    return {step: round(seconds, 6) for step, seconds in steps.items() if seconds}


def _loss(evaluation: Evaluation | None) -> float | None:
    return evaluation.loss if evaluation else None


def _by_key(parts: Sequence[Mapping[str, Any]], combine: Any) -> dict[str, Any]:
    """What `combine` makes of the ranks' values, by key; a rank without one has 0."""
    return {
        key: combine([part.get(key, 0) for part in parts]) for key in sorted({key for part in parts for key in part})
    }


def _control_bytes(report: RankReport, trainer: int) -> int:
    """A rank's control bytes, dealt evenly to the trainers on it; the parts add up exactly."""
    trainers, num_bytes = sorted(report.trainers), report.control_bytes_sent
    place = trainers.index(trainer)
    return num_bytes * (place + 1) // len(trainers) - num_bytes * place // len(trainers)
