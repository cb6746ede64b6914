"""The records of experiments that are kept beside this file, and times to losses."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from runs import Record

RECORDS = Path(__file__).parent / "records.jsonl"
Points = Sequence[tuple[float, float]]
"""Seconds and the loss that is reached in them, of runs with budgets of their own."""


class Records:
    """The records of all runs."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_name = {record["name"]: record for record in records}

    @classmethod
    def kept(cls) -> "Records":
        """Those beside this file."""
        return cls(json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines())

    def points(self, question: str, side: str, seed: int, amount: str = "budget") -> Points:
        """One side's runs with a seed, by rising seconds, or by another amount that records have."""
        return sorted((run[amount], run["loss"]) for run in self._runs(question, side, seed))

    def curve(self, question: str, side: str, seed: int) -> Points:
        """The losses of a side's longest run with a seed, by seconds, on the way and at its end; empty: none."""
        runs = self._runs(question, side, seed)
        return max(runs, key=lambda run: run["budget"])["curve"] if runs else []

    def reached(self, question: str, side: str, seed: int) -> Points:
        """The losses that runs of a side with a seed, of whatever length, are the first to come to, by seconds."""
        found: Points = []
        for seconds, loss in sorted(tuple(point) for run in self._runs(question, side, seed) for point in run["curve"]):
            if not found or loss < found[-1][1]:
                found.append((seconds, loss))
        return found

    def _runs(self, question: str, side: str, seed: int) -> list[Record]:
        """A side's runs with a seed, of all lengths."""
        found = []
        for name, record in self.by_name.items():
            asked, by, _, seeded = name.split("/")
            if (asked, by, seeded) == (question, side, f"seed{seed}"):
                found.append(record)
        return found

    def loss(self, question: str, side: str, seconds: float, seed: int) -> float | None:
        """The loss of one run; None: it was not made."""
        return dict(self.points(question, side, seed)).get(seconds)


def seconds_to(loss: float, points: Points) -> float:
    """Time to a loss: between two budgets, and beyond the last, straight lines of the loss over log(seconds).

    A side with one budget says no more than that it takes longer (infinite), or at most that.
    """
    if len(points) < 2:
        return next((seconds for seconds, reached in points if reached <= loss), math.inf)
    (near, high), (far, low) = points[0], points[-1]
    for earlier, later in pairwise(points):
        if earlier[1] >= loss >= later[1]:
            (near, high), (far, low) = earlier, later
    return math.exp(math.log(near) + (loss - high) / (low - high) * math.log(far / near)) if low < high else math.inf
