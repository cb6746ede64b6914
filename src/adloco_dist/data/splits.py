"""The two splits of a run's data."""

from dataclasses import dataclass
from typing import Any

from adloco_dist.data.protocols import Dataset, SequenceTable


@dataclass(frozen=True)
class Splits:
    """Training and validation data."""

    train: Dataset
    validation: SequenceTable
    source: str
    """What the data was made of, for people."""
    notes: tuple[str, ...] = ()
    """What a user should know of how the data was read."""

    @property
    def digest(self) -> str:
        """Equal digests mean equal data."""
        return self.train.digest

    def facts(self) -> dict[str, Any]:
        """What the run's record says of the data."""
        return {
            "source": self.source,
            "digest": self.digest,
            "train_sequences": self.train.num_sequences,
            "validation_sequences": self.validation.num_sequences,
        }
