"""What outer steps did, as plain values: `DiLoCo.last_step`, and what the launcher's ranks report to each other."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OuterStepReport:
    """What an outer step did, or the parts of it that were taken; those of several fragments or of a round add up."""

    num_finite: float | None = None
    """Workers whose weights were finite and contributed, one that takes fewer updates than others as a part of one.
    0: the anchor stayed. None: no step was completed."""
    nonfinite: list[int] = field(default_factory=list)
    """Workers on this rank that were left out because they were not finite."""
    pseudo_gradient_norm: float = 0.0
    """Norm of the mean pseudo-gradient, of this rank's part of a sharded model; 0 if the anchor stayed."""
    bytes_sent: int = 0
    """Bytes that this rank sent for it."""
    gradient_bytes_sent: int = 0
    """Bytes that this rank sent before it, where every update averages gradients."""
    seconds: float = 0.0
    """Time in which no updates were computed for it, `wait_seconds` included."""
    transfer_seconds: float = 0.0
    """How long the average took, where updates were taken meanwhile; else 0."""
    wait_seconds: float = 0.0
    """Time of that in which this rank waited."""

    def __add__(self, other: "OuterStepReport") -> "OuterStepReport":
        counts = [step.num_finite for step in (self, other) if step.num_finite is not None]
        return OuterStepReport(
            min(counts, default=None),
            sorted({*self.nonfinite, *other.nonfinite}),
            (self.pseudo_gradient_norm**2 + other.pseudo_gradient_norm**2) ** 0.5,
            self.bytes_sent + other.bytes_sent,
            self.gradient_bytes_sent + other.gradient_bytes_sent,
            self.seconds + other.seconds,
            self.transfer_seconds + other.transfer_seconds,
            self.wait_seconds + other.wait_seconds,
        )
