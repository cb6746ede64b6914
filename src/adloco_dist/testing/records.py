"""A sink of records for tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass

from adloco_dist.run.rows import Record


@dataclass
class KeptRecords:
    """Keeps the records that rank 0 would write."""

    records: list[Record]

    def write(self, records: Sequence[Record]) -> None:
        """Keep one round's records."""
        self.records.extend(records)

    def close(self, result: Record | None) -> None:
        """Nothing is left to do."""

    def state(self) -> Record:
        """Nothing is needed to resume."""
        return {}
