"""What ranks tell rank 0 at the end of a round, and how it adds up to one record for each trainer."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adloco_dist.config import Settings
from adloco_dist.decisions.batch import BatchPlan, BatchReport
from adloco_dist.decisions.plan import PoolReport, RoundPlan
from adloco_dist.decisions.statistics import GradientStatistics
from adloco_dist.decisions.switch import least, pass_size

Record = dict[str, Any]


@dataclass
class TrainerReport:
    """One rank's share of a trainer's round. Sums, so that shares of several ranks add up."""

    checksum: list[int] = field(default_factory=list)
    """Of the anchor after the outer step; equal on all ranks of the trainer."""
    cursor: int = 0
    """Sequences that the trainer has taken from its shard."""
    train_loss_sum: float = 0.0
    """Sum over the rank's workers of their mean loss over the round, in nats per token."""
    num_workers: int = 0
    """Workers of the trainer on this rank."""
    num_finite: int = 0
    """Workers of the whole trainer that contributed to the outer step."""
    pseudo_gradient_norm: float = 0.0
    statistics: GradientStatistics | None = None
    """Of the round's first gradients, on the trainer's lowest rank; None elsewhere, and where nothing was measured."""
    pass_seconds_per_sequence: float = 0.0
    """Forward and backward passes of all the trainer's workers on this rank; measured for switch.n=auto only."""
    validation_loss_sum: float = 0.0
    """Sum over the tokens that this rank evaluated, in nats."""
    validation_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    bytes_sent: dict[str, int] = field(default_factory=dict)
    """By kind of collective, to other ranks."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about this share of the round."""


@dataclass
class RankReport:
    """What one rank tells rank 0 at the end of a round."""

    rank: int
    stop_requested: bool = False
    control_seconds: float = 0.0
    """Time in the last exchange of report and plan, waiting for slower ranks included."""
    control_bytes_sent: int = 0
    """In that exchange."""
    capacity: int | None = None
    """Sequences that the rank's device takes in one pass; None: any number."""
    trainers: dict[int, TrainerReport] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "RankReport":
        trainers = {}
        for id, share in message["trainers"].items():
            statistics = share["statistics"] and GradientStatistics(**share["statistics"])
            trainers[int(id)] = TrainerReport(**{**share, "statistics": statistics})
        return cls(**{**message, "trainers": trainers})


def pool_report(reports: Sequence[RankReport], last: RoundPlan | None, seconds: float) -> PoolReport:
    """What the next plan needs to know.

    Args:
        last: the plan of the round that the reports are about; None for the state before training.
        seconds: rank 0's clock since the first round began.
    """
    differing = []
    for trainer in sorted({id for report in reports for id in report.trainers}):
        held: dict[tuple[int, ...], list[int]] = {}
        for report in reports:
            if trainer in report.trainers:
                held.setdefault(tuple(report.trainers[trainer].checksum), []).append(report.rank)
        if len(held) > 1:
            camps = " and ".join(f"rank {', '.join(map(str, ranks))}" for ranks in held.values())
            differing.append(f"the anchor of trainer {trainer} differs between {camps}")
    batches = _batch_reports(reports, last) if last else {}
    return PoolReport(any(report.stop_requested for report in reports), seconds, differing, batches)


def _batch_reports(reports: Sequence[RankReport], last: RoundPlan) -> dict[int, BatchReport]:
    # An evaluation belongs to no update.
    round_seconds = max(
        report.control_seconds
        + sum(sum(share.seconds.values()) - share.seconds.get("evaluate", 0.0) for share in report.trainers.values())
        for report in reports
    )
    return {
        trainer: BatchReport(
            statistics=_measured(shares),
            pass_seconds_per_sequence=max(share.pass_seconds_per_sequence for _, share in shares),
            seconds_per_update=round_seconds / last.updates,
        )
        for trainer, shares in _shares_by_trainer(reports).items()
    }


def _shares_by_trainer(reports: Sequence[RankReport]) -> dict[int, list[tuple[RankReport, TrainerReport]]]:
    shares: dict[int, list[tuple[RankReport, TrainerReport]]] = {}
    for report in reports:
        for trainer, share in report.trainers.items():
            shares.setdefault(trainer, []).append((report, share))
    return shares


def _measured(shares: list[tuple[RankReport, TrainerReport]]) -> GradientStatistics | None:
    """What the trainer's lowest rank measured."""
    return next((share.statistics for _, share in shares if share.statistics), None)


def round_records(
    settings: Settings, plan: RoundPlan | None, next_plan: RoundPlan, reports: Sequence[RankReport]
) -> list[Record]:
    """One record for each trainer: the rows of metrics.jsonl.

    Args:
        plan: of the round that the reports are about; None for the state before training.
        next_plan: what was decided from the reports: it holds the statistics smoothed over this round.
    """
    shares = _shares_by_trainer(reports)
    records = [_record(settings, plan, trainer, shares[trainer]) for trainer in sorted(shares)]
    for record in records:
        trainer = record["trainer"]
        if plan and settings.measures_gradients and trainer in next_plan.batches:
            record |= _statistics(_measured(shares[trainer]), next_plan.batches[trainer])
    return records


def perplexity(loss: float) -> float:
    """exp(loss), without overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def _record(
    settings: Settings, plan: RoundPlan | None, trainer: int, shares: list[tuple[RankReport, TrainerReport]]
) -> Record:
    reports = [share for _, share in shares]
    record: Record = {
        "round": plan.round + 1 if plan else 0,
        "trainer": trainer,
        "ranks": [rank.rank for rank, _ in shares],
        "workers": sum(share.num_workers for share in reports),
        "cursor": reports[0].cursor,
    }
    if plan:
        sequences = plan.updates * plan.total_batch(trainer)
        record |= {
            "updates": plan.updates,
            "sequences": sequences,
            "tokens": sequences * settings.data.sequence_length,
            "pool_tokens": plan.pool_tokens + plan.updates * plan.progress.tokens_per_update,
            "total_batch": plan.total_batch(trainer),
            **_batch(plan.batches[trainer], shares),
            "train_loss": sum(share.train_loss_sum for share in reports) / record["workers"],
            "finite_workers": reports[0].num_finite,
            "pseudo_gradient_norm": reports[0].pseudo_gradient_norm,
        }
    validation_tokens = sum(share.validation_tokens for share in reports)
    if validation_tokens:
        loss = sum(share.validation_loss_sum for share in reports) / validation_tokens
        record |= {"validation_loss": loss, "validation_perplexity": perplexity(loss)}
    record["seconds"] = _slowest([share.seconds for share in reports])
    record["seconds"]["control"] = max(rank.control_seconds for rank, _ in shares)
    record["bytes_sent"] = _total([share.bytes_sent for share in reports])
    record["bytes_sent"]["control"] = sum(_control_share(rank, trainer) for rank, _ in shares)
    return record


def _batch(batch: BatchPlan, shares: list[tuple[RankReport, TrainerReport]]) -> Record:
    """Why the batch was what it was, and how the trainer's tightest rank took it."""
    micro_batch = pass_size(batch.local_batch, least(batch.batch_limit, *(rank.capacity for rank, _ in shares)))
    notes = [f"rank {rank.rank}: {note}" for rank, share in shares for note in share.notes]
    return {
        "local_batch": batch.local_batch,
        "request": batch.request,
        "bounded_request": batch.bounded,
        "bound": batch.bound,
        "mode": batch.mode,
        "batch_limit": batch.batch_limit,
        "switch_n": batch.switch_n,
        "micro_batch": micro_batch,
        "passes": -(-batch.local_batch // micro_batch),
        "notes": [batch.note, *notes] if batch.note else notes,
    }


def _statistics(measured: GradientStatistics | None, next_batch: BatchPlan) -> Record:
    """What was measured in the round, and the averages on which the next round's request stands."""
    smoothed = next_batch.smoothed.statistics
    return {
        "statistics": asdict(measured) if measured else None,
        "smoothed": asdict(smoothed) if smoothed else None,
        "noise_scale": smoothed.noise_scale if smoothed else None,
    }


def _slowest(seconds: list[dict[str, float]]) -> dict[str, float]:
    phases = {phase for rank in seconds for phase in rank}
    return {phase: max(rank.get(phase, 0.0) for rank in seconds) for phase in sorted(phases)}


def _total(bytes_sent: list[dict[str, int]]) -> dict[str, int]:
    kinds = {kind for rank in bytes_sent for kind in rank}
    return {kind: sum(rank.get(kind, 0) for rank in bytes_sent) for kind in sorted(kinds)}


def _control_share(report: RankReport, trainer: int) -> int:
    """A rank's control bytes, dealt evenly to the trainers that it hosts; the shares add up exactly."""
    hosted = sorted(report.trainers)
    place, bytes_sent = hosted.index(trainer), report.control_bytes_sent
    return bytes_sent * (place + 1) // len(hosted) - bytes_sent * place // len(hosted)
