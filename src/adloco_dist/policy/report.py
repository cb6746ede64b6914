"""What ranks report to rank 0 at the end of a round."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

from msgspec import Struct, field

from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.evaluation import Evaluation

Key = TypeVar("Key", int, str)
Value = TypeVar("Value", int, Evaluation)


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
    """Time of the forward and backward passes of all the workers, from their last updates. 0 unless batches are
    weighed against what computing them takes (`Settings.measures_times`)."""
    step_losses: list[float] = []
    """Sums over the workers of the mean loss of each update, in order, where they are recorded; NaN for those that were
    taken before a restart."""
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
            later.step_losses,
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
        return OuterReport(
            min(counts, default=None),
            sorted({*self.nonfinite, *other.nonfinite}),
            sorted({*self.outliers, *other.outliers}),
            (self.pseudo_gradient_norm**2 + other.pseudo_gradient_norm**2) ** 0.5,
            self.seconds + other.seconds,
            self.transfer_seconds + other.transfer_seconds,
            self.wait_seconds + other.wait_seconds,
            _added(self.bytes_sent, other.bytes_sent),
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

    def __add__(self, other: "MergeReport") -> "MergeReport":
        """Those of two ranks as one."""
        return MergeReport(
            max(self.seconds, other.seconds),
            _added(self.bytes_sent, other.bytes_sent),
            _added(self.members, other.members),
            _added(self.merged, other.merged),
        )


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

    def spent(self, *steps: str) -> float:
        """Wall time of these steps, of all trainers here."""
        return sum(getattr(share, step).seconds for share in self.trainers.values() for step in steps)

    @property
    def utilisation(self) -> float:
        """Share of the round's time in which updates were computed; the rest are averages, waiting, evaluation."""
        steps = [seconds for trainer in self.trainers.values() for seconds in trainer.seconds.items()]
        inner = sum(seconds for step, seconds in steps if step == "inner")
        total = sum(seconds for _, seconds in steps) + self.control_seconds + self.merge.seconds
        total += self.checkpoint_seconds
        return round(inner / total, 6) if total else 0.0

    def in_words(self) -> str:
        """The rank's round, as its own log has it: how long each trainer's steps took here."""
        parts = []
        for number, trainer in self.trainers.items():
            steps = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in trainer.seconds.items())
            parts.append(f"trainer {number}: {steps}")
        return "; ".join([*parts, f"plan {self.plan_digest}"])


def sums_by_update(losses: Iterable[Sequence[float]]) -> list[float]:
    """The sums of several lists, element by element; some may be shorter than others."""
    return [sum(of_update) for of_update in zip_longest(*losses, fillvalue=0.0)]


def _added(one: Mapping[Key, Value], other: Mapping[Key, Value]) -> dict[Key, Value]:
    """Sums by key; what only one side has is taken as it is."""
    return {**one, **other, **{key: one[key] + other[key] for key in one.keys() & other.keys()}}
