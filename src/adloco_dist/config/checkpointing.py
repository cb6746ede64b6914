"""When checkpoints are written, and which of them are kept."""

from dataclasses import dataclass

from adloco_dist.config.errors import SettingsError


@dataclass
class CheckpointSettings:
    """A checkpoint is due as soon as one of the intervals that are set is over; a stop request always writes one."""

    every_rounds: int | None = None
    """Rounds between two checkpoints; null: no such interval."""
    every_tokens: int | None = None
    """Tokens of the whole pool between two checkpoints; null: no such interval."""
    every_minutes: float | None = 10.0
    """Minutes of rank 0's clock between two checkpoints, which end with the round; null: no such interval."""
    keep_last: int = 2
    """Newest checkpoints that are kept: what is left to start from if the newest is damaged."""
    keep_every_rounds: int | None = None
    """Checkpoints after a multiple of so many rounds are kept for ever; null: none is."""
    copies: bool = True
    """Where nodes have directories of their own: keep a copy of every part on another node."""

    def __post_init__(self) -> None:
        for name in ("every_rounds", "every_tokens", "every_minutes", "keep_every_rounds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingsError.of(f"checkpoint.{name}", value, "must be > 0, or null")
        if self.keep_last < 1:
            raise SettingsError.of("checkpoint.keep_last", self.keep_last, "must be >= 1")
