"""What ranks report to rank 0 at the end of a round."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from msgspec import Struct, field
from msgspec.structs import replace

from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.evaluation import Evaluation, total
from adloco_dist.policy.passes import Passes


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
    passes: list[Passes] = []
    """Of the last update of a round that measures gradients, where batches are weighed against what computing them
    takes (`BatchingSettings.measures_times`)."""
    step_losses: list[float] = []
    """Sums over the workers of the mean loss of each update, where they are recorded; NaN before a restart."""
    notes: list[str] = []
    """What a user should know."""

    def __add__(self, later: "InnerReport") -> "InnerReport":
        """This report and that of the updates after it: losses and targets are those of the round so far."""
        seconds, data_seconds = self.seconds + later.seconds, self.data_seconds + later.data_seconds
        notes, passes = self.notes + later.notes, self.passes + later.passes
        return replace(later, seconds=seconds, data_seconds=data_seconds, notes=notes, passes=passes)


class MeasureReport(Struct, frozen=True, omit_defaults=True):
    """What came of measuring a trainer's gradients."""

    sketches: dict[int, bytes] = {}
    """What was seen of the round's first gradients (pool/estimator.py), by worker; until rank 0 has that of all."""
    statistics: GradientStatistics | None = None
    """Their statistics, in the report of the trainer's lowest rank; None in others, or if not measured."""
    shared_squared_norm: float | None = None
    """What workers that stand apart have in common of `squared_norm`; None: they stand at one point, or alone."""
    seconds: float = 0.0
    bytes_sent: int = 0
    """Of the sketches, which are a part of the report."""


class AnchorReport(Struct, frozen=True, omit_defaults=True):
    """Where a trainer stands between two rounds."""

    checksum: list[int] = []
    """Checksum of the anchor; equal on all ranks of the trainer."""
    is_finite: bool = True
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
    outer: OuterStepReport = OuterStepReport()
    anchor: AnchorReport = AnchorReport()
    evaluation: EvaluationReport = EvaluationReport()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by step; steps that took none are left out."""
        steps = {"inner": self.inner, "measure": self.measure, "outer": self.outer, "evaluation": self.evaluation}
        return {name: step.seconds for name, step in steps.items() if step.seconds}

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes sent to other ranks, by kind of collective."""
        sent = {"statistics": self.measure.bytes_sent} if self.measure.bytes_sent else {}
        if self.outer.seconds or self.outer.bytes_sent:
            sent["outer"] = self.outer.bytes_sent
        if self.outer.gradient_bytes_sent:
            sent["gradients"] = self.outer.gradient_bytes_sent
        return sent


class MergeReport(Struct, frozen=True, omit_defaults=True):
    """What a merge before a round cost a rank."""

    seconds: float = 0.0
    """Time for averaging, new groups, and probing memory again."""
    bytes_sent: int = 0
    members: dict[int, Evaluation] = {}
    """This rank's parts of the evaluations of the trainers that merge, before they do; where curves are drawn."""
    merged: Evaluation | None = None
    """The same of the survivor after that."""

    def __add__(self, other: "MergeReport") -> "MergeReport":
        """Those of two ranks as one."""
        none = Evaluation()
        members = {
            member: self.members.get(member, none) + other.members.get(member, none)
            for member in self.members | other.members
        }
        merged = total([self.merged, other.merged])
        return MergeReport(max(self.seconds, other.seconds), self.bytes_sent + other.bytes_sent, members, merged)


class RankReport(Struct, omit_defaults=True):
    """What one rank sends to rank 0 at the end of a round.

    Fields at their defaults are not sent: rank 0 receives a report from each of a thousand ranks.
    """

    rank: int
    seconds: float = 0.0
    """The rank's clock at the end of the round, since the first one began; rank 0's counts."""
    control_seconds: float = 0.0
    """Time that the rank waited for the round's plan."""
    control_bytes_sent: int = 0
    """Bytes of reports and plans that the rank has sent since its last report."""
    checkpoint_seconds: float = 0.0
    """Time in which updates waited for a checkpoint's copy of the state, before the round."""
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

    def of(self, trainer: int) -> TrainerReport:
        """This rank's part of a trainer's round, to which its steps are added."""
        return self.trainers.setdefault(trainer, TrainerReport())

    def spent(self, *steps: str) -> float:
        """Wall time of these steps, of all trainers here."""
        return sum(getattr(share, step).seconds for share in self.trainers.values() for step in steps)

    @property
    def utilisation(self) -> float:
        """Share of the round's time in which updates were computed; the rest are averages, waiting, evaluation."""
        total = self.spent("inner", "measure", "outer", "evaluation")
        total += self.control_seconds + self.merge.seconds + self.checkpoint_seconds
        return round(self.spent("inner") / total, 6) if total else 0.0

    def in_words(self) -> str:
        """The rank's round, as its own log has it: how long each trainer's steps took here."""
        parts = []
        for number, trainer in self.trainers.items():
            steps = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in trainer.seconds.items())
            parts.append(f"trainer {number}: {steps}")
        return "; ".join([*parts, f"plan {self.plan_digest}"])


def smallest_capacity(capacities: Iterable[int | None]) -> int | None:
    """The smallest number of sequences that any of several devices takes in one micro-batch; None: any number."""
    return min((capacity for capacity in capacities if capacity is not None), default=None)


def sums_by_update(losses: Iterable[Sequence[float]]) -> list[float]:
    """The sums of several lists, element by element; some may be shorter than others."""
    return [sum(of_update) for of_update in zip_longest(*losses, fillvalue=0.0)]
