"""What ranks tell rank 0 at the end of a round, and what of it the next plan needs to know."""

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adloco_dist.decisions.batch import BatchReport
from adloco_dist.decisions.evaluation import Evaluation
from adloco_dist.decisions.plan import PoolReport, RoundPlan
from adloco_dist.decisions.statistics import GradientStatistics


@dataclass
class TrainerReport:
    """One rank's share of a trainer's round. Sums, so that shares of several ranks add up."""

    checksum: list[int] = field(default_factory=list)
    """Of the anchor after the outer step; equal on all ranks of the trainer."""
    is_finite: bool = True
    """Whether the anchor is."""
    cursor: int = 0
    """Sequences that the trainer has taken from its shard."""
    train_loss_sum: float = 0.0
    """Sum over the rank's workers of their mean loss over the round, in nats per target."""
    num_workers: int = 0
    """Workers of the trainer on this rank."""
    num_finite: int = 0
    """Workers of the whole trainer that contributed to the outer step."""
    spoilt: list[int] = field(default_factory=list)
    """Workers on this rank that were left out of the outer step, for they were not finite."""
    pseudo_gradient_norm: float = 0.0
    statistics: GradientStatistics | None = None
    """Of the round's first gradients, on the trainer's lowest rank; None elsewhere, and where nothing was measured."""
    pass_seconds_per_sequence: float = 0.0
    """Forward and backward passes of all the trainer's workers on this rank; measured for switch.n=auto only."""
    num_targets: int = 0
    """Tokens (or labels) that this rank's workers predicted; padding is none."""
    data_seconds: float = 0.0
    """Of the inner phase, until this rank's batches were there."""
    validation: Evaluation | None = None
    """Of the part that this rank evaluated; None: not in this round."""
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
    plan_digest: str = ""
    """Of the plan that the rank acted on."""
    regroup_seconds: float = 0.0
    """Before the round: merging, new groups, memory probed again."""
    merge_bytes_sent: dict[int, int] = field(default_factory=dict)
    """By trainer."""
    capacity: int | None = None
    """Sequences that the rank's device takes in one pass; None: any number."""
    is_writing: bool = False
    """Whether the rank has not finished its part of the last checkpoint."""
    resources: dict[str, float] = field(default_factory=dict)
    """What the rank used in the round: memory, processor, GPU (cluster/monitor.py)."""
    trainers: dict[int, TrainerReport] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """Plain JSON values, without those that are at their defaults: a thousand ranks send one each to rank 0."""
        message = _without_defaults(asdict(self), RankReport(self.rank))
        shares = {id: _without_defaults(share, TrainerReport()) for id, share in message.get("trainers", {}).items()}
        return {**message, "rank": self.rank, "trainers": shares}

    def in_words(self) -> str:
        """The rank's round, as its own log has it: how long each trainer's phases took here."""
        told = []
        for id, share in self.trainers.items():
            phases = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in share.seconds.items())
            told.append(f"trainer {id}: {phases}")
        return "; ".join([*told, f"plan {self.plan_digest}"])

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "RankReport":
        trainers = {}
        for id, share in message["trainers"].items():
            statistics = GradientStatistics(**share["statistics"]) if "statistics" in share else None
            validation = Evaluation(**share["validation"]) if "validation" in share else None
            trainers[int(id)] = TrainerReport(**{**share, "statistics": statistics, "validation": validation})
        merge_bytes = {int(id): sent for id, sent in message.get("merge_bytes_sent", {}).items()}
        return cls(**{**message, "trainers": trainers, "merge_bytes_sent": merge_bytes})


def _without_defaults(message: dict[str, Any], default: Any) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value != getattr(default, key)}


Shares = dict[int, list[tuple[RankReport, TrainerReport]]]
"""By trainer: its ranks' reports, and in each of them its share."""


def pool_report(reports: Sequence[RankReport], last: RoundPlan | None, seconds: float) -> PoolReport:
    """What the next plan needs to know.

    Args:
        last: the plan of the round that the reports are about; None for the state before training.
        seconds: rank 0's clock since the first round began.
    """
    shares = shares_by_trainer(reports)
    errors = []
    for trainer in sorted(shares):
        camps = _camps([(rank.rank, tuple(share.checksum)) for rank, share in shares[trainer]])
        if len(camps) > 1:
            errors.append(f"the anchor of trainer {trainer} differs between {' and '.join(camps)}")
    camps = _camps([(report.rank, report.plan_digest) for report in reports])
    if len(camps) > 1:
        errors.append(f"another plan was acted on by {' and by '.join(camps)}")
    return PoolReport(
        stop_requested=any(report.stop_requested for report in reports),
        seconds=seconds,
        errors=errors,
        batches=_batch_reports(reports, shares, last) if last else {},
        not_finite=frozenset(id for id, parts in shares.items() if not all(share.is_finite for _, share in parts)),
        spoilt=frozenset(id for id, parts in shares.items() if any(share.spoilt for _, share in parts)),
        unmoved=frozenset(id for id, parts in shares.items() if not any(share.num_finite for _, share in parts)),
        capacities=[report.capacity for report in reports],
        is_writing=any(report.is_writing for report in reports),
    )


def _camps(held: Sequence[tuple[int, Hashable]]) -> list[str]:
    """The ranks that hold the same, one text for each group of them."""
    camps: dict[Hashable, list[int]] = {}
    for rank, value in held:
        camps.setdefault(value, []).append(rank)
    return [f"rank {', '.join(map(str, ranks))}" for ranks in camps.values()]


def _batch_reports(reports: Sequence[RankReport], shares: Shares, last: RoundPlan) -> dict[int, BatchReport]:
    # An evaluation belongs to no update.
    round_seconds = max(
        report.control_seconds
        + sum(sum(share.seconds.values()) - share.seconds.get("evaluate", 0.0) for share in report.trainers.values())
        for report in reports
    )
    return {
        trainer: BatchReport(
            statistics=measured(parts),
            pass_seconds_per_sequence=max(share.pass_seconds_per_sequence for _, share in parts),
            seconds_per_update=round_seconds / last.updates,
        )
        for trainer, parts in shares.items()
    }


def shares_by_trainer(reports: Sequence[RankReport]) -> Shares:
    """Every trainer's ranks, in the order of the reports."""
    shares: Shares = {}
    for report in reports:
        for trainer, share in report.trainers.items():
            shares.setdefault(trainer, []).append((report, share))
    return shares


def measured(shares: list[tuple[RankReport, TrainerReport]]) -> GradientStatistics | None:
    """What the trainer's lowest rank measured."""
    return next((share.statistics for _, share in shares if share.statistics), None)
