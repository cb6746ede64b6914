"""What of a record differs between two runs that are the same."""

from collections.abc import Iterable, Mapping
from typing import Any

CLOCKS = (
    "seconds", "data_seconds", "elapsed_seconds", "rank_seconds", "utilisation", "resources", "bytes_sent", "plan",
    "worth",
)  # fmt: skip
"""Times, and what is measured or counted by time; a plan holds the seconds that have passed."""


def without_clocks(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of records, with what two runs that are the same have in common alone."""
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]
