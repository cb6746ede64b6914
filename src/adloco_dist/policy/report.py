"""What ranks report to rank 0 at the end of a round, and what of it the next plan needs to know."""

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.batch import BatchReport
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.link import RoundCost
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.text import ranks_by_value


class InnerReport(Struct, omit_defaults=True):
    """What a trainer's workers on one rank did in the inner phase."""

    loss_sum: float = 0.0
    """Sum over the workers of their mean training loss, per target."""
    num_targets: int = 0
    """Targets (tokens, labels) that the workers predicted; padding is none."""
    seconds: float = 0.0
    """The phase's wall time, divided among the rank's trainers by the sequences that their workers took."""
    data_seconds: float = 0.0
    """Time until the workers' batches were there, summed over them."""
    compute_seconds_per_sequence: float = 0.0
    """Time of the forward and backward passes of all the workers, from their last updates; for switch.n=auto only."""
    notes: list[str] = []
    """What a user should know."""

    def __add__(self, later: "InnerReport") -> "InnerReport":
        """This report and that of the updates after it: losses and targets are those of the round so far."""
        return InnerReport(
            later.loss_sum,
            later.num_targets,
            self.seconds + later.seconds,
            self.data_seconds + later.data_seconds,
            later.compute_seconds_per_sequence,
            self.notes + later.notes,
        )


class MeasureReport(Struct, frozen=True, omit_defaults=True):
    """What came of measuring a trainer's gradients."""

    statistics: GradientStatistics | None = None
    """Statistics of the round's first gradients, on the trainer's lowest rank; None elsewhere, or if not measured."""
    seconds: float = 0.0
    bytes_sent: int = 0
    """Bytes that this rank sent."""


class OuterReport(Struct, frozen=True, omit_defaults=True):
    """What a trainer's outer steps did, or the parts of them that were taken; those of one round add up."""

    num_finite: float | None = None
    """Workers of the whole trainer that contributed, the fastest counted as one, slower ones as less; None: no step was
    completed in the round."""
    nonfinite: list[int] = []
    """Workers on this rank that were left out because they were not finite."""
    outliers: list[int] = []
    """Workers on this rank that were left out because of the norm of their pseudo-gradients."""
    pseudo_gradient_norm: float = 0.0
    seconds: float = 0.0
    """Time in which no updates were computed for them, `wait_seconds` included."""
    transfer_seconds: float = 0.0
    """Time that averages travelled while updates were computed, or the rank waited for them after that."""
    wait_seconds: float = 0.0
    """Time of that in which the rank waited."""
    bytes_sent: dict[str, int] = {}
    """Bytes that this rank sent: "outer" in the step; "gradients" before it, where every update averages gradients."""

    def __add__(self, other: "OuterReport") -> "OuterReport":
        counts = [step.num_finite for step in (self, other) if step.num_finite is not None]
        sent = {kind: self.bytes_sent.get(kind, 0) for kind in self.bytes_sent | other.bytes_sent}
        return OuterReport(
            min(counts, default=None),
            sorted({*self.nonfinite, *other.nonfinite}),
            sorted({*self.outliers, *other.outliers}),
            (self.pseudo_gradient_norm**2 + other.pseudo_gradient_norm**2) ** 0.5,
            self.seconds + other.seconds,
            self.transfer_seconds + other.transfer_seconds,
            self.wait_seconds + other.wait_seconds,
            {kind: count + other.bytes_sent.get(kind, 0) for kind, count in sent.items()},
        )


class AnchorReport(Struct, frozen=True, omit_defaults=True):
    """Where a trainer stands between two rounds."""

    checksum: list[int] = []
    """Checksum of the anchor; equal on all ranks of the trainer."""
    is_finite: bool = True
    """Whether the anchor is finite."""
    position: int = 0
    """Sequences that the trainer has taken from its shard."""


class EvaluationReport(Struct, frozen=True, omit_defaults=True):
    """One rank's part of an evaluation."""

    sums: Evaluation | None = None
    """Sums over this rank's part; None: the anchor was not evaluated."""
    seconds: float = 0.0


class TrainerReport(Struct, omit_defaults=True):
    """One rank's part of a trainer's round, a fragment from each step. Sums of several ranks add up."""

    num_workers: int = 0
    """Workers of the trainer on this rank."""
    inner: InnerReport = field(default_factory=InnerReport)
    measure: MeasureReport = MeasureReport()
    outer: OuterReport = OuterReport()
    anchor: AnchorReport = AnchorReport()
    evaluation: EvaluationReport = EvaluationReport()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by step; steps that took none are left out."""
        steps = ("inner", "measure", "outer", "evaluation")
        return {step: seconds for step in steps if (seconds := getattr(self, step).seconds)}

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes sent to other ranks, by kind of collective."""
        statistics = {"statistics": self.measure.bytes_sent} if self.measure.seconds else {}
        return {**statistics, **self.outer.bytes_sent}


class MergeReport(Struct, frozen=True, omit_defaults=True):
    """What merges before a round cost a rank."""

    seconds: float = 0.0
    """Time for averaging, new groups, and probing memory again."""
    bytes_sent: dict[int, int] = {}
    """Bytes that this rank sent, by trainer."""
    members: dict[int, Evaluation] = {}
    """This rank's parts of the evaluations of the trainers that merge, before they do; where curves are drawn."""
    merged: dict[int, Evaluation] = {}
    """The same of those that have taken in others, after that."""


class RankReport(Struct, omit_defaults=True):
    """What one rank sends to rank 0 at the end of a round.

    Fields at their defaults are not sent: rank 0 receives a report from each of a thousand ranks.
    """

    rank: int
    stop_requested: bool = False
    control_seconds: float = 0.0
    """Time in the last exchange of report and plan, waiting for slower ranks included."""
    control_bytes_sent: int = 0
    """Bytes that the rank sent in that exchange."""
    plan_digest: str = ""
    """Digest of the plan that the rank acted on."""
    merge: MergeReport = MergeReport()
    capacity: int | None = None
    """Sequences that the rank's device takes in one micro-batch; None: any number."""
    is_writing: bool = False
    """Whether the rank has not finished its part of the last checkpoint."""
    resources: dict[str, float] = {}
    """What the rank used in the round: memory, processor, GPU (cluster/monitor.py)."""
    update_seconds: float = 0.0
    """Time of one worker's update; 0: not measured."""
    notes: list[str] = []
    """What a user should know about this rank's round."""
    trainers: dict[int, TrainerReport] = {}

    def spent(self, *steps: str) -> float:
        """Wall time of these steps, of all trainers here."""
        return sum(getattr(share, step).seconds for share in self.trainers.values() for step in steps)

    @property
    def utilisation(self) -> float:
        """Share of the round's time in which updates were computed; the rest are averages, waiting, evaluation."""
        steps = [seconds for trainer in self.trainers.values() for seconds in trainer.seconds.items()]
        inner = sum(seconds for step, seconds in steps if step == "inner")
        total = sum(seconds for _, seconds in steps) + self.control_seconds + self.merge.seconds
        return round(inner / total, 6) if total else 0.0

    def in_words(self) -> str:
        """The rank's round, as its own log has it: how long each trainer's steps took here."""
        parts = []
        for number, trainer in self.trainers.items():
            steps = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in trainer.seconds.items())
            parts.append(f"trainer {number}: {steps}")
        return "; ".join([*parts, f"plan {self.plan_digest}"])


Shares = dict[int, list[tuple[RankReport, TrainerReport]]]
"""The reports of a trainer's ranks, each with the trainer's share in it, by trainer."""


def pool_report(reports: Sequence[RankReport], last: RoundPlan | None, seconds: float) -> PoolReport:
    """What the next plan needs to know.

    Args:
        last: the plan of the round that the reports are about; None for the state before training.
        seconds: rank 0's clock since the first round began.
    """
    shares = shares_by_trainer(reports)
    cost = _round_cost(reports, last) if last else None
    errors = []
    for trainer in sorted(shares):
        groups = ranks_by_value([(rank.rank, tuple(share.anchor.checksum)) for rank, share in shares[trainer]])
        if len(groups) > 1:
            errors.append(f"the anchor of trainer {trainer} differs between {' and '.join(groups.values())}")
    groups = ranks_by_value([(report.rank, report.plan_digest) for report in reports])
    if len(groups) > 1:
        errors.append(f"another plan was acted on by {' and by '.join(groups.values())}")
    return PoolReport(
        stop_requested=any(report.stop_requested for report in reports),
        seconds=seconds,
        errors=errors,
        batches=_batch_reports(reports, shares, last, cost) if last else {},
        train_loss={trainer: train_loss(parts) for trainer, parts in shares.items()} if last else {},
        validation_loss={
            trainer: evaluation.loss for trainer, parts in shares.items() if (evaluation := evaluated(parts))
        },
        not_finite=_trainers_with(shares, lambda part: not part.anchor.is_finite),
        nonfinite=_trainers_with(shares, lambda part: bool(part.outer.nonfinite)),
        unmoved=frozenset(shares) - _trainers_with(shares, lambda part: len(part.outer.nonfinite) < part.num_workers),
        capacities=[report.capacity for report in reports],
        update_seconds=[report.update_seconds for report in reports],
        cost=cost,
        is_writing=any(report.is_writing for report in reports),
    )


def _round_cost(reports: Sequence[RankReport], last: RoundPlan) -> RoundCost | None:
    """The cost of a round that all ranks took as a whole, on the rank that waited least."""
    computing = [report for report in reports if report.trainers]
    if not all(report.update_seconds for report in computing):
        return None
    steps = [[share.outer for share in report.trainers.values()] for report in computing]
    return RoundCost(
        update_seconds=max(report.spent("inner") for report in computing) / last.updates,
        exposed_seconds=min(report.control_seconds + report.spent("outer") for report in computing),
        transfer_seconds=min(sum(step.transfer_seconds for step in own) for own in steps),
        wait_seconds=min(sum(step.wait_seconds for step in own) for own in steps),
    )


def _trainers_with(shares: Shares, holds: Callable[[TrainerReport], bool]) -> frozenset[int]:
    """The trainers of which at least one rank's share fulfils a condition."""
    return frozenset(trainer for trainer, parts in shares.items() if any(holds(part) for _, part in parts))


def _batch_reports(
    reports: Sequence[RankReport], shares: Shares, last: RoundPlan, cost: RoundCost | None
) -> dict[int, BatchReport]:
    # An evaluation belongs to no update.
    round_seconds = max(report.control_seconds + report.spent("inner", "measure", "outer") for report in reports)
    return {
        trainer: BatchReport(
            statistics=measured(parts),
            is_measured=last.measures,
            compute_seconds_per_sequence=max(share.inner.compute_seconds_per_sequence for _, share in parts),
            seconds_per_update=round_seconds / last.updates,
            exposed_share=cost.exposed_share(last.updates) if cost else None,
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


def train_loss(shares: list[tuple[RankReport, TrainerReport]]) -> float:
    """Mean loss of the trainer's workers over the round, in nats per target."""
    return sum(share.inner.loss_sum for _, share in shares) / sum(share.num_workers for _, share in shares)


def evaluated(shares: list[tuple[RankReport, TrainerReport]]) -> Evaluation | None:
    """The sum of the parts that ranks evaluated; None: the trainer was not evaluated in the round."""
    parts = [share.evaluation.sums for _, share in shares if share.evaluation.sums]
    return sum(parts, Evaluation()) if parts else None


def measured(shares: list[tuple[RankReport, TrainerReport]]) -> GradientStatistics | None:
    """What the trainer's lowest rank measured."""
    return next((share.measure.statistics for _, share in shares if share.measure.statistics), None)
