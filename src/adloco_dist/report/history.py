"""The rows of a run as columns, which is what figures and sentences are made of."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import isfinite
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adloco_dist.policy.merging import Merge
from adloco_dist.run.rows import TrainerRow, parse_rows

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
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
REQUEST = "the request itself"
"""Stands for the bound of a batch that no bound changed."""
SHARED_STEPS = frozenset({"control", "merge", "checkpoint"})
"""Steps of a rank that concern all its trainers: each trainer's row has their whole time."""


@dataclass(frozen=True)
class History:
    """Rows of metrics.jsonl, in the order in which they were written."""

    rows: Sequence[TrainerRow] = ()
    problems: Sequence[str] = ()
    """Lines that are left out, because they are no rows."""
    num_bytes: int = 0
    """Bytes of metrics.jsonl that these lines take."""

    @cached_property
    def row_rounds(self) -> Numbers:
        return np.array([row.round for row in self.rows], np.int64)

    @cached_property
    def row_trainers(self) -> Numbers:
        return np.array([row.trainer for row in self.rows], np.int64)

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
        if name not in self._columns:
            self._columns[name] = np.array([*map(attrgetter(name), self.rows)], np.float64)  # which makes None NaN
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, Values]:
        return {}

    @cached_property
    def gradient_norms(self) -> Values:
        """Of every row's mean gradient; NaN where it was not measured, or nothing but noise was."""
        squares = np.array([(row.statistics or {}).get("squared_norm") for row in self.rows], np.float64)
        return np.sqrt(squares, out=np.full(len(squares), np.nan), where=squares > 0)

    @cached_property
    def bounds(self) -> list[str | None]:
        """What made the batch of every row: a bound, or REQUEST, which no bound changed; None: there was no batch."""
        return [None if row.mode is None else row.bound or REQUEST for row in self.rows]

    @cached_property
    def axes(self) -> Mapping[str, Values]:
        """For every round, what has passed at its end, by the names of AXES."""
        seconds = self.highest(self.values("elapsed_seconds"))
        if np.isnan(seconds).all():  # rows of a version that had no clock
            of_rows = np.array([sum(row.seconds.values()) for row in self.rows], np.float64)
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
        sent: dict[str, Values] = defaultdict(lambda: np.zeros(len(self.rounds)))
        for place, row in self._placed():
            for kind, num_bytes in row.bytes_sent.items():
                sent[kind][place] += num_bytes
        return dict(sent)

    @cached_property
    def resources(self) -> Mapping[str, OfRanks]:
        """What each rank used in every round, by name."""
        used = defaultdict[str, defaultdict[int, Values]](self._of_ranks)
        for place, row in self._placed():
            for rank, figures in row.resources.items():
                for name, number in figures.items():
                    if number is not None:
                        used[name][rank][place] = number
        return used

    @property
    def utilisation(self) -> OfRanks:
        """The share of each rank's round in which updates were computed."""
        shares = self._of_ranks()
        for place, row in self._placed():
            for rank, share in row.utilisation.items():
                shares[rank][place] = share
        return shares

    @property
    def transfer_seconds(self) -> OfRanks:
        """How long the averages of all trainers on a rank travelled beside its updates, in every round."""
        travelled = self._of_ranks()
        for place, row in self._placed():
            for rank, steps in row.rank_seconds.items():
                if "transfer" in steps:
                    of_rank = travelled[rank]
                    of_rank[place] = steps["transfer"] + (of_rank[place] if isfinite(of_rank[place]) else 0.0)
        return travelled

    def _placed(self) -> Iterator[tuple[int, TrainerRow]]:
        """Every row, with where its round is in `rounds`."""
        return zip(self.places.tolist(), self.rows, strict=True)

    def _of_ranks(self) -> defaultdict[int, Values]:
        """A number of any rank in every round, not known so far."""
        return defaultdict(lambda: np.full(len(self.rounds), np.nan))

    @cached_property
    def rank_seconds(self) -> Mapping[int, Mapping[str, float]]:
        """Seconds of every rank by step, over all rounds; what its trainers share is counted once, and `outer` is
        without `wait`."""
        spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for _, rows in groupby(self.rows, lambda row: row.round):
            shared: dict[tuple[int, str], float] = defaultdict(float)
            for row in rows:
                for rank, steps in row.rank_seconds.items():
                    for step, seconds in steps.items():
                        if step in SHARED_STEPS:
                            shared[rank, step] = max(seconds, shared[rank, step])
                        else:
                            spent[rank][step] += seconds
            for (rank, step), seconds in shared.items():
                spent[rank][step] += seconds
        for steps in spent.values():
            steps["outer"] -= steps["wait"]
        return dict(sorted(spent.items()))

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
        return [(row, row.merge) for row in self.rows if row.merge]


def read_history(path: Path, earlier: History | None = None) -> History:
    """The rows of metrics.jsonl, as far as its lines are whole: those that were read `earlier`, and what follows them.
    If it has become shorter, as in a run that has begun again, all of it is read again. Raises an OSError if it cannot
    be read."""
    known = earlier if earlier and earlier.num_bytes <= path.stat().st_size else History()
    with path.open("rb") as file:
        file.seek(known.num_bytes)
        content = file.read()
    num_whole = content.rfind(b"\n") + 1
    rows, problems = parse_rows(content[:num_whole])
    return History([*known.rows, *rows], [*known.problems, *problems], known.num_bytes + num_whole)
