"""The records of a run as columns: all rounds of a long run are read in seconds, and only as far as they are shown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import json as arrow_json

from adloco_dist.run.reading import decode_json
from adloco_dist.run.rows import Record

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
AXES = {
    "round": "round",
    "updates": "updates of a worker",
    "tokens": "tokens of the pool",
    "bytes": "bytes sent by all ranks",
    "seconds": "seconds",
}
"""What curves are drawn against, by the name in the data, with what the axis is called."""
REQUEST = "the request itself"
"""What made a batch that no bound changed."""
BLOCK_BYTES = 1 << 22
"""Of records, which threads parse block by block; a row fits into one."""


@dataclass(frozen=True)
class Note:
    """Something that the records say in words, in as many rounds as it holds."""

    first: int
    last: int
    trainer: int
    text: str


@dataclass(frozen=True)
class History:
    """Rows of metrics.jsonl, in the order in which they were written."""

    table: pa.Table
    problems: Sequence[str] = field(default=())
    """Lines that are left out, because they are no records."""

    @property
    def num_rounds(self) -> int:
        """Rounds that were trained; 0 where there is only the state before training."""
        return int(self.rounds.max()) if len(self.rounds) else 0

    @cached_property
    def row_rounds(self) -> Numbers:
        """The round of every row."""
        return _integers(self.table, "round")

    @cached_property
    def row_trainers(self) -> Numbers:
        """The trainer of every row."""
        return _integers(self.table, "trainer")

    @cached_property
    def rounds(self) -> Numbers:
        """All rounds, ascending."""
        return np.unique(self.row_rounds)

    @cached_property
    def places(self) -> Numbers:
        """For every row, where its round is in `rounds`."""
        return np.searchsorted(self.rounds, self.row_rounds)

    @cached_property
    def first_rows(self) -> Numbers:
        """Where a row of every round is, for what all rows of a round have in common."""
        return np.unique(self.row_rounds, return_index=True)[1]

    @cached_property
    def trainers(self) -> list[int]:
        """All trainers that ever were, ascending."""
        return np.unique(self.row_trainers).tolist()

    def rows_of(self, trainer: int) -> Numbers:
        """Where a trainer's rows are."""
        return np.flatnonzero(self.row_trainers == trainer)

    def values(self, *path: str) -> Values:
        """A number of every row, NaN where there is none.

        Args:
            path: the name of a field, and of fields within it.
        """
        column = _column(self.table, path)
        if column is None or not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            return np.full(self.table.num_rows, np.nan)
        return np.asarray(np.from_dlpack(column.cast(pa.float64()).fill_null(np.nan)), np.float64)

    def words(self, *path: str) -> list[str | None]:
        """A string of every row."""
        column = _column(self.table, path)
        if column is None or not pa.types.is_string(column.type):
            return [None] * self.table.num_rows
        return column.to_pylist()

    @cached_property
    def bounds(self) -> npt.NDArray[np.object_]:
        """What made the batch of every row: a bound, or REQUEST, which no bound changed; None: there was no batch."""
        words = zip(self.words("bound"), self.words("mode"), strict=True)
        return np.array([None if mode is None else bound or REQUEST for bound, mode in words], object)

    def names(self, *path: str) -> list[str]:
        """The fields that a field has in any row: ranks, steps, kinds of collectives."""
        column = _column(self.table, path)
        return [] if column is None or not pa.types.is_struct(column.type) else [one.name for one in column.type]

    @cached_property
    def axes(self) -> Mapping[str, Values]:
        """For every round, what has passed at its end, by the names of AXES."""
        of_round = {name: self.highest(self.values(name)) for name in ("updates", "pool_tokens", "elapsed_seconds")}
        sent = sum((np.nan_to_num(self.values("bytes_sent", kind)) for kind in self.names("bytes_sent")), np.zeros(1))
        steps = [np.nan_to_num(self.values("seconds", step)) for step in self.names("seconds")]
        seconds = of_round["elapsed_seconds"]
        if np.isnan(seconds).all():  # records of a version that had no clock
            seconds = np.cumsum(np.nan_to_num(self.highest(sum(steps, np.zeros(self.table.num_rows)))))
        return {
            "round": self.rounds.astype(np.float64),
            "updates": np.cumsum(np.nan_to_num(of_round["updates"])),
            "tokens": np.nan_to_num(of_round["pool_tokens"]),
            "bytes": np.cumsum(self.totals(np.broadcast_to(sent, self.table.num_rows))),
            "seconds": seconds,
        }

    def totals(self, values: npt.ArrayLike) -> Values:
        """Sums over the rows of each round; what is not known counts as nothing."""
        found = np.zeros(len(self.rounds))
        np.add.at(found, self.places, np.nan_to_num(np.asarray(values)))
        return found

    def highest(self, values: Values) -> Values:
        """The maximum over the rows of each round; NaN where nothing is known."""
        found = np.full(len(self.rounds), np.nan)
        np.fmax.at(found, self.places, values)
        return found

    def records(self, name: str) -> list[Record]:
        """The rows that have a field, and more in it than an empty list, with what says whose they are."""
        column = _column(self.table, (name,))
        if column is None or pa.types.is_null(column.type):
            return []
        chosen = np.from_dlpack(column.is_valid().cast(pa.int8())).astype(bool)
        if pa.types.is_list(column.type):
            chosen &= np.diff(np.from_dlpack(column.offsets)) > 0
        columns = [one for one in ("round", "trainer", "ranks", "workers", name) if one in self.table.column_names]
        return [_without_nulls(row) for row in self.table.select(columns).take(np.flatnonzero(chosen)).to_pylist()]

    @cached_property
    def notes(self) -> list[Note]:
        """What rows say in words, each once, in the order of the rounds in which it was first said."""
        column = _column(self.table, ("notes",))
        if column is None or not pa.types.is_list(column.type) or not pa.types.is_string(column.type.value_type):
            return []
        rows = np.repeat(np.arange(len(column)), np.diff(np.from_dlpack(column.offsets)))
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for row, text in zip(rows.tolist(), column.flatten().to_pylist(), strict=True):
            round_, key = int(self.row_rounds[row]), (int(self.row_trainers[row]), text)
            found[key] = (found.get(key, (round_, round_))[0], round_)
        notes = [Note(first, last, trainer, text) for (trainer, text), (first, last) in found.items()]
        return sorted(notes, key=lambda note: (note.first, note.trainer, note.text))


def read_history(path: Path, start: int = 0) -> tuple[History, int]:
    """Read metrics.jsonl from a byte on, as far as its lines are whole.

    Returns:
        The rows, and the byte after them.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    table, problems = _parsed(whole)
    return History(table, problems), start + len(whole)


def joined(earlier: History, later: History) -> History:
    """The rows of both."""
    tables = [history.table for history in (earlier, later) if history.table.num_rows]
    if len(tables) < 2:
        return History(tables[0] if tables else later.table, [*earlier.problems, *later.problems])
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    return History(table, [*earlier.problems, *later.problems])


def _parsed(content: bytes) -> tuple[pa.Table, list[str]]:
    """The rows of whole lines, and what is to be said of those that are none."""
    try:
        table = _table(content)
        if _is_of_records(table):
            return table, []
    except pa.ArrowInvalid:
        pass
    kept, problems = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = decode_json(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(name), int) for name in ("round", "trainer")):
                raise ValueError("has no round and trainer")
            kept.append(json.dumps(row).encode())
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    try:
        return _table(b"\n".join(kept)), problems
    except pa.ArrowInvalid as error:  # fields of two kinds, which no run writes
        return _table(b""), [*problems, f"records do not fit together: {str(error).splitlines()[0]}"]


def _table(content: bytes) -> pa.Table:
    if not content or content.isspace():
        return pa.table({"round": pa.array([], pa.int64()), "trainer": pa.array([], pa.int64())})
    options = arrow_json.ReadOptions(block_size=BLOCK_BYTES)
    return arrow_json.read_json(pa.BufferReader(content), read_options=options).combine_chunks()


def _is_of_records(table: pa.Table) -> bool:
    names = ("round", "trainer")
    return all(
        name in table.column_names and pa.types.is_integer(table[name].type) and not table[name].null_count
        for name in names
    )


def _column(table: pa.Table, path: Sequence[str]) -> pa.Array | None:
    """A field, or a field within it; None: no row has it."""
    if path[0] not in table.column_names:
        return None
    column = table[path[0]]
    found: Any = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    for name in path[1:]:
        if not pa.types.is_struct(found.type) or found.type.get_field_index(name) < 0:
            return None
        found = found.field(name)
    return found


def _integers(table: pa.Table, name: str) -> Numbers:
    return np.asarray(np.from_dlpack(table[name].chunk(0).cast(pa.int64())), np.int64)


def _without_nulls(value: Any) -> Any:
    """Leave out what other rows have and this one has not; null within a list is a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
