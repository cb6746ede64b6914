"""When a checkpoint is written."""

from dataclasses import dataclass

from adloco_dist.config import CheckpointSettings


@dataclass(frozen=True)
class CheckpointId:
    """A point in a run: where it stood when a checkpoint was planned."""

    number: int = 0
    """Number of the checkpoint, counted over all starts of the run; 0: none yet."""
    rounds: int = 0
    """Rounds that were complete."""
    tokens: int = 0
    """Tokens that the whole pool had trained on."""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The directory of the checkpoint."""
        return f"{self.number:06d}-round-{self.rounds}"


def is_due(settings: CheckpointSettings, last: CheckpointId, now: CheckpointId) -> bool:
    """Whether one of the intervals has passed."""
    minutes = settings.every_minutes
    passed = (
        (settings.every_rounds, now.rounds - last.rounds),
        (settings.every_tokens, now.tokens - last.tokens),
        (None if minutes is None else 60 * minutes, now.seconds - last.seconds),
    )
    return any(interval is not None and distance >= interval for interval, distance in passed)
