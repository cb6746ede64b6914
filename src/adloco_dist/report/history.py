"""What has happened in a run, round by round: what figures and sentences are made of."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from adloco_dist.policy.merging import Merge
from adloco_dist.report.columns import Column, Columns, Numbers, Values, read_columns
from adloco_dist.run.rows import TrainerRow

OfRanks = Mapping[int, Values]
"""A number of each rank for every round; NaN where it is not known."""
AXES = {
    "round": "round",
    "updates": "updates of a worker",
    "tokens": "tokens of the pool",
    "bytes": "bytes sent by all ranks",
    "seconds": "seconds",
}
"""What curves are drawn against, by the name in the data, with what the axis is called."""
SHARED_STEPS = frozenset({"control", "merge", "checkpoint"})
"""Steps of a rank that concern all its trainers: each trainer's row has their whole time."""


@dataclass(frozen=True)
class History:
    """The rows of metrics.jsonl, and what they come to."""

    columns: Columns

    @property
    def row_rounds(self) -> Numbers:
        """The round of every row."""
        return self.columns.rounds

    @property
    def row_trainers(self) -> Numbers:
        """The trainer of every row."""
        return self.columns.trainers

    def bounds(self, trainer: int) -> Mapping[str, Numbers]:
        """The rows of a trainer whose batch a bound made, or REQUEST, which no bound changed."""
        rows = {str(bound): column.rows for bound, column in self.grouped("bound").items()}
        return {bound: those[self.row_trainers[those] == trainer] for bound, those in rows.items()}

    @property
    def told(self) -> Sequence[TrainerRow]:
        """The rows that have more to tell than numbers."""
        return self.columns.told

    @cached_property
    def rounds(self) -> Numbers:
        """All rounds, ascending."""
        return np.unique(self.row_rounds)

    @property
    def num_rounds(self) -> int:
        """Rounds that were trained; 0 where there is only the state before training."""
        return int(self.rounds[-1]) if len(self.rounds) else 0

    @cached_property
    def places(self) -> Numbers:
        """For every row, where its round is in `rounds`."""
        return np.searchsorted(self.rounds, self.row_rounds)

    @cached_property
    def trainers(self) -> list[int]:
        """All that ever were, ascending."""
        return np.unique(self.row_trainers).tolist()

    def rows_of(self, trainer: int) -> Numbers:
        """Where a trainer's rows are."""
        return np.flatnonzero(self.row_trainers == trainer)

    def values(self, name: str) -> Values:
        """The number that every row has in a field; NaN where there is none."""
        return self.columns.numbers[name]

    def grouped(self, *group: str | int) -> Mapping[str | int, Column]:
        """What rows have in a field, or what is of a rank there."""
        return self.columns.grouped.get(group, {})

    @cached_property
    def axes(self) -> Mapping[str, Values]:
        """For every round, what has passed at its end, by the names of AXES."""
        seconds = self.highest(self.values("elapsed_seconds"))
        if np.isnan(seconds).all():  # rows of a version that had no clock
            of_rows = np.full(len(self.row_rounds), np.nan)
            for step in self.grouped("seconds").values():
                of_rows[step.rows] = np.nan_to_num(of_rows[step.rows]) + step.values
            seconds = np.cumsum(np.nan_to_num(self.highest(of_rows)))
        return {
            "round": self.rounds.astype(np.float64),
            "updates": np.cumsum(np.nan_to_num(self.highest(self.values("updates")))),
            "tokens": np.nan_to_num(self.highest(self.values("pool_tokens"))),
            "bytes": np.cumsum(sum(self.bytes_sent.values(), np.zeros(len(self.rounds)))),
            "seconds": seconds,
        }

    @cached_property
    def bytes_sent(self) -> Mapping[str, Values]:
        """Bytes that all ranks sent in every round, by kind of collective."""
        return {str(kind): self._totals(column) for kind, column in self.grouped("bytes_sent").items()}

    @cached_property
    def resources(self) -> Mapping[str, OfRanks]:
        """What each rank used in every round, by name."""
        used = defaultdict[str, dict[int, Values]](dict)
        for rank in self._ranks("resources"):
            for name, column in self.grouped("resources", rank).items():
                used[str(name)][rank] = self._last(column)
        return used

    @property
    def utilisation(self) -> OfRanks:
        """The share of each rank's round in which updates were computed."""
        return {int(rank): self._last(column) for rank, column in self.grouped("utilisation").items()}

    @property
    def transfer_seconds(self) -> OfRanks:
        """How long the averages of all trainers on a rank travelled beside its updates, in every round."""
        columns = {rank: self.grouped("rank_seconds", rank).get("transfer") for rank in self._ranks("rank_seconds")}
        return {
            rank: np.where(np.isnan(self._last(column)), np.nan, self._totals(column))
            for rank, column in columns.items()
            if column
        }

    @cached_property
    def rank_seconds(self) -> Mapping[int, Mapping[str, float]]:
        """Seconds of every rank by step, over all rounds; what its trainers share is counted once, and `outer` is
        without `wait`."""
        spent: dict[int, dict[str, float]] = {}
        for rank in self._ranks("rank_seconds"):
            spent[rank] = defaultdict(float)
            for step, column in self.grouped("rank_seconds", rank).items():
                if step in SHARED_STEPS:
                    of_rounds = np.zeros(len(self.rounds))
                    np.maximum.at(of_rounds, self.places[column.rows], column.values)
                    spent[rank][str(step)] = float(of_rounds.sum())
                else:
                    spent[rank][str(step)] = float(column.values.sum())
            spent[rank]["outer"] -= spent[rank]["wait"]
        return spent

    def _ranks(self, name: str) -> list[int]:
        """The ranks that a field has numbers of, ascending."""
        return sorted(int(rank) for field, *ranks in self.columns.grouped if field == name for rank in ranks)

    def _totals(self, column: Column) -> Values:
        """The sum over the rows of each round."""
        return np.asarray(np.bincount(self.places[column.rows], column.values, len(self.rounds)), np.float64)

    def _last(self, column: Column) -> Values:
        """What the last row of each round has; NaN where none has anything."""
        last = np.full(len(self.rounds), np.nan)
        last[self.places[column.rows]] = column.values
        return last

    def highest(self, values: Values) -> Values:
        """The maximum over the rows of each round; NaN where nothing is known."""
        highest = np.full(len(self.rounds), np.nan)
        np.fmax.at(highest, self.places, values)
        return highest

    def lowest(self, values: Values) -> Values:
        """The minimum over the rows of each round; NaN where nothing is known."""
        return -self.highest(-values)

    @cached_property
    def best_validation(self) -> tuple[Numbers, Values]:
        """The validation loss of the best trainer, where any was evaluated: the rounds' places, and the losses."""
        lowest = self.lowest(self.values("validation_loss"))
        places = np.flatnonzero(np.isfinite(lowest))
        return places, lowest[places]

    @cached_property
    def merges(self) -> list[tuple[TrainerRow, Merge]]:
        """The rows of trainers that have just taken in others, with these merges."""
        return [(row, row.merge) for row in self.told if row.merge]


def read_history(path: Path, earlier: History | None = None, processes: Executor | None = None) -> History:
    """The rows of metrics.jsonl, of which those that were read `earlier` are not read again; raises an OSError if it
    cannot be read."""
    columns = read_columns(path, earlier.columns if earlier else Columns(), processes)
    return earlier if earlier and columns is earlier.columns else History(columns)
