"""How reports and plans add up to one record for each trainer and round: the rows of metrics.jsonl."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from adloco_dist.config import BatchRequest, Settings
from adloco_dist.messages import decode, encode
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.batch import BatchPlan
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import ranks_of_seat
from adloco_dist.policy.merging import Merge
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.regrouping import Regrouping
from adloco_dist.policy.report import RankReport, TrainerReport
from adloco_dist.policy.summary import evaluated, measured, shares_by_trainer, step_losses, train_loss
from adloco_dist.policy.switch import micro_batch_size, min_limit
from adloco_dist.policy.views import TrainerView
from adloco_dist.text import set_of_ranks

Record = dict[str, Any]


def round_records(
    settings: Settings, plan: RoundPlan | None, next_plan: RoundPlan, reports: Sequence[RankReport]
) -> list[Record]:
    """One record for each trainer: the rows of metrics.jsonl.

    Args:
        plan: that of the round that the reports are about; None for the state before training.
        reports: of all seats; of a seat of several ranks, figures that are a rank's are under its lowest.
        next_plan: what was decided from the reports: it holds the statistics smoothed over this round.
    """
    shares, size = shares_by_trainer(reports), settings.pool.ranks_per_worker
    seconds = next_plan.seconds
    records = [_record(settings, plan, seconds, trainer, shares[trainer]) for trainer in sorted(shares)]
    for record in records:
        trainer = record["trainer"]
        if plan and plan.regrouping and trainer in plan.regrouping.origins:
            record |= _regrouping(settings, plan, plan.regrouping, trainer, reports)
            record["seconds"]["merge"] = max(rank.merge.seconds for rank, _ in shares[trainer])
            record["bytes_sent"]["merge"] = sum(report.merge.bytes_sent.get(trainer, 0) for report in reports)
        if plan and settings.measures_gradients:
            record |= _statistics(measured(shares[trainer]), next_plan.batches.get(trainer))
    # What ranks without workers sent belongs to no trainer more than to another.
    unclaimed = sum(report.control_bytes_sent for report in reports if not report.trainers)
    for place, record in enumerate(records):
        record["bytes_sent"]["control"] += _even_part(unclaimed, place, len(records))
    if plan:  # what a rank notes is of no trainer more than of another
        records[0]["notes"] += [f"rank {size * seat.rank}: {note}" for seat in reports for note in seat.notes]
    return records


def _record(
    settings: Settings, plan: RoundPlan | None, elapsed_seconds: float, trainer: int,
    shares: list[tuple[RankReport, TrainerReport]],
) -> Record:  # fmt: skip
    reports, size = [share for _, share in shares], settings.pool.ranks_per_worker
    record: Record = {
        "round": plan.round + 1 if plan else 0,
        "trainer": trainer,
        "elapsed_seconds": round(elapsed_seconds, 6),
        "ranks": [rank for seat, _ in shares for rank in ranks_of_seat(seat.rank, size)],
        "workers": sum(share.num_workers for share in reports),
        "cursor": reports[0].anchor.position,
    }
    if plan:
        sequences = plan.sequences(trainer)
        worker_updates = [plan.updates_of(trainer, worker) for worker in range(plan.layout.num_workers(trainer))]
        record |= {
            "plan": shares[0][0].plan_digest,
            "updates": plan.updates,
            "delay_updates": plan.rhythm.delay_updates,
            "worker_updates": worker_updates,
            "sequences": sequences,
            "tokens": sequences * settings.data.sequence_length,
            "targets": sum(share.inner.num_targets for share in reports),
            "data_seconds": max(share.inner.data_seconds for share in reports),
            "resources": {size * seat.rank: seat.resources for seat, _ in shares},
            "pool_tokens": plan.pool_tokens + plan.round_tokens,
            "total_batch": plan.total_batch(trainer),
            **_batch(plan.batches[trainer], shares),
            "train_loss": train_loss(shares),
            "outlier_workers": sorted(worker for share in reports for worker in share.outer.outliers),
            "finite_workers": sum(share.num_workers - len(share.outer.nonfinite) for share in reports),
            "nonfinite_workers": sorted(worker for share in reports for worker in share.outer.nonfinite),
            "pseudo_gradient_norm": reports[0].outer.pseudo_gradient_norm,
        }
        if settings.run.step_losses:
            record["step_losses"] = step_losses(shares, worker_updates)
    if evaluation := evaluated(shares):
        record |= evaluation.figures()
    record["seconds"] = _slowest([share.seconds for share in reports])
    if plan:
        record["utilisation"] = {size * seat.rank: seat.utilisation for seat, _ in shares}
        record["rank_seconds"] = {size * seat.rank: _rank_seconds(seat, share) for seat, share in shares}
    record["seconds"]["control"] = max(rank.control_seconds for rank, _ in shares)
    record["bytes_sent"] = _total([share.bytes_sent for share in reports])
    record["bytes_sent"]["control"] = sum(_control_share(rank, trainer) for rank, _ in shares)
    return record


def _rank_seconds(rank: RankReport, share: TrainerReport) -> dict[str, float]:
    """Where a rank's round went, by step; `wait` is a part of `outer`, and `transfer` went on beside other steps.

    What concerns all trainers on the rank (`control`, `merge`, `checkpoint`) is the same in the record of each.
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


def _batch(batch: BatchPlan, shares: list[tuple[RankReport, TrainerReport]]) -> Record:
    """Why the batch was what it was, and how the trainer's tightest rank took it."""
    micro_batch = micro_batch_size(
        batch.local_batch, min_limit(batch.batch_limit, *(rank.capacity for rank, _ in shares))
    )
    notes = [f"rank {rank.rank}: {note}" for rank, share in shares for note in share.inner.notes]
    return {
        "local_batch": batch.local_batch,
        "request": batch.request,
        "bounded_request": batch.bounded,
        "bound": batch.bound,
        "mode": batch.mode,
        "batch_limit": batch.batch_limit,
        "switch_n": batch.switch_n,
        "worth": batch.worth,
        "micro_batch": micro_batch,
        "passes": -(-batch.local_batch // micro_batch),
        "notes": [batch.note, *notes] if batch.note else notes,
    }


def _statistics(measured: GradientStatistics | None, next_batch: BatchPlan | None) -> Record:
    """What was measured in the round, and the averages on which the next round's request stands, if there is one."""
    smoothed = next_batch.smoothed.statistics if next_batch else None
    return {
        "statistics": asdict(measured) if measured else None,
        "smoothed": asdict(smoothed) if smoothed else None,
        "noise_scale": smoothed.noise_scale if smoothed else None,
    }


def _regrouping(
    settings: Settings, plan: RoundPlan, regrouping: Regrouping, trainer: int, reports: Sequence[RankReport]
) -> Record:
    """How a trainer came to be what it was in the round."""
    detail: Record = {"origins": regrouping.origins[trainer]}
    for merge in regrouping.merges:
        if merge.survivor == trainer:
            size = settings.pool.ranks_per_worker
            idle = [size * seat.rank for seat in reports if seat.rank in plan.probed and not seat.trainers]
            is_replay = settings.batching.request is BatchRequest.replay
            policy = BatchRequest.replay.name if is_replay else settings.merge.policy.name
            members = {one: _loss([report.merge.members.get(one) for report in reports]) for one in merge.shares}
            merged = _loss([report.merge.merged.get(trainer) for report in reports])
            detail["merge"] = {**encode(merge), "policy": policy, "idle_ranks": idle}
            detail["merge"] |= {"member_losses": members, "loss": merged}
    return detail


def _loss(parts: Sequence[Evaluation | None]) -> float | None:
    """The validation loss that ranks have evaluated in parts; None: none has."""
    found = [part for part in parts if part]
    return sum(found, Evaluation()).loss if found else None


def _slowest(seconds: list[dict[str, float]]) -> dict[str, float]:
    phases = {phase for rank in seconds for phase in rank}
    return {phase: max(rank.get(phase, 0.0) for rank in seconds) for phase in sorted(phases)}


def _total(bytes_sent: list[dict[str, int]]) -> dict[str, int]:
    kinds = {kind for rank in bytes_sent for kind in rank}
    return {kind: sum(rank.get(kind, 0) for rank in bytes_sent) for kind in sorted(kinds)}


def _control_share(report: RankReport, trainer: int) -> int:
    """A rank's control bytes, dealt evenly to the trainers on it."""
    placed = sorted(report.trainers)
    return _even_part(report.control_bytes_sent, placed.index(trainer), len(placed))


def _even_part(whole: int, place: int, num_parts: int) -> int:
    """Part `place` of a number dealt evenly; the parts add up exactly."""
    return whole * (place + 1) // num_parts - whole * place // num_parts


def recorded_merge(row: Record) -> Merge:
    """The merge in a survivor's record, where null stands for an infinite request."""
    candidates = {
        member: {**candidate, "request": math.inf if candidate["request"] is None else candidate["request"]}
        for member, candidate in row["merge"]["candidates"].items()
    }
    return decode(Merge, {**row["merge"], "candidates": candidates})


def merge_in_words(row: Record) -> str:
    """The merge in a survivor's record, in words."""
    merge, ranks, idle = recorded_merge(row), row["ranks"], row["merge"]["idle_ranks"]
    ended = [
        f"{member} ({_asked(merge.candidates[member])})" if merge.shares[member] else f"{member} (left out: not finite)"
        for member in merge.ended
    ]
    detail = [
        f"before round {row['round']}: trainer{'s' if len(ended) > 1 else ''} {', '.join(ended)} into "
        f"{merge.survivor} ({_asked(merge.candidates[merge.survivor])}), {row['merge']['policy']}",
        f"ranks {set_of_ranks(ranks)} now average together" if len(ranks) > 1 else f"all on rank {ranks[0]}",
    ]
    if row["merge"].get("loss") is not None:
        members = row["merge"]["member_losses"].items()
        losses = [f"{member} {loss:.4f}" for member, loss in members if loss is not None and math.isfinite(loss)]
        detail.append(f"validation losses {', '.join(losses)}, of their average {row['merge']['loss']:.4f}")
    if idle:
        detail.append(f"ranks {set_of_ranks(idle)} idle" if len(idle) > 1 else f"rank {idle[0]} idle")
    return "; ".join(detail)


def nonfinite_in_words(row: Record) -> str:
    """The workers that were left out of a trainer's outer step."""
    nonfinite, num_finite = row["nonfinite_workers"], row["finite_workers"]
    detail = f"worker{'s' if len(nonfinite) > 1 else ''} {', '.join(map(str, nonfinite))} not finite, left out"
    rest = f"{num_finite} of {row['workers']} averaged" if num_finite else "no outer step"
    return f"round {row['round']}, trainer {row['trainer']}: {detail}; {rest}"


def _asked(view: TrainerView) -> str:
    """A request, and what the bounds made of it, which is what the trainer counts for."""
    request = f"asked for {view.request:,.4g}" if view.request < math.inf else "asked for any batch"
    return request if view.bounded == view.request else f"{request}, bounded to {view.bounded:,.4g}"
