"""metrics.jsonl as columns: the rows of a long run are read in little memory, and each of them once."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adloco_dist.report.processes import helpers
from adloco_dist.run.rows import Number, TrainerRow, parse_rows

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
NUMBERS = (
    "elapsed_seconds", "workers", "updates", "delay_updates", "learning_rate", "pool_tokens", "total_batch", "request",
    "worth", "passes", "train_loss", "pseudo_gradient_norm", "validation_loss", "validation_accuracy", "noise_scale",
)  # fmt: skip
"""Fields of a row that are drawn."""
GRADIENT_NORM = "gradient_norm"
"""Of the mean gradient, beside NUMBERS: not known where it was not measured, or nothing but noise was."""
REQUEST = "the request itself"
"""Stands for the bound of a batch that no bound changed."""
BLOCK_BYTES, FEW_BLOCKS = 1 << 24, 4
"""Of the file, whose rows are in memory at one time; more than a few of them are read by several processes."""
Group = tuple[str | int, ...]
"""What numbers are of: a field, and in some fields a rank."""


@dataclass(frozen=True)
class Column:
    """Numbers that some rows have, in the order of the rows; one row may have several."""

    rows: Numbers
    """For every number, where its row is."""
    values: Values


@dataclass(frozen=True)
class Columns:
    """Rows in the order in which they were written."""

    rounds: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of every row, as the next one."""
    trainers: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    numbers: Mapping[str, Values] = field(default_factory=lambda: _numbers_of(()))
    """NUMBERS and GRADIENT_NORM of every row; NaN where there is none."""
    grouped: Mapping[Group, Mapping[str | int, Column]] = field(default_factory=dict[Group, Mapping[str | int, Column]])
    """What rows have by kind, step or rank."""
    told: Sequence[TrainerRow] = ()
    """The rows that have merged, or have more to say than numbers; and the first of every trainer."""
    problems: Sequence[str] = ()
    """Lines that are left out, because they are no rows."""
    num_lines: int = 0
    num_bytes: int = 0
    """Bytes of these lines."""


def read_columns(path: Path, earlier: Columns, processes: Executor | None = None) -> Columns:
    """The rows of metrics.jsonl, as far as its lines are whole: those that were read `earlier`, and what follows them.
    If it has become shorter, as in a run that has begun again, all of it is read again. Raises an OSError if it cannot
    be read."""
    num_bytes = path.stat().st_size
    known = earlier if earlier.num_bytes <= num_bytes else Columns()
    blocks, columns_of = _blocks(path, known), partial(_columns_of, path)
    if num_bytes - known.num_bytes <= FEW_BLOCKS * BLOCK_BYTES:
        parts = list(map(columns_of, blocks))
    else:
        with helpers(processes) as processes:  # which begin with the first while others are looked for
            parts = list(processes.map(columns_of, blocks))
    return _joined([known, *parts]) if parts else known


@dataclass(frozen=True)
class _Block:
    """Whole lines of a file. Processes are told where they are, and read them themselves."""

    begin: int
    num_bytes: int
    first_line: int
    """Number of the first line."""
    num_lines: int


def _blocks(path: Path, known: Columns) -> Iterator[_Block]:
    """The whole lines after those that are known, many at a time."""
    begin, first_line = known.num_bytes, known.num_lines + 1
    with path.open("rb") as file:
        file.seek(begin)
        while lines := file.readlines(BLOCK_BYTES):
            num_bytes = sum(map(len, lines))
            if not lines[-1].endswith(b"\n"):  # as somebody is still writing it
                num_bytes -= len(lines.pop())
            if lines:
                yield _Block(begin, num_bytes, first_line, len(lines))
            begin, first_line = begin + num_bytes, first_line + len(lines)


def _columns_of(path: Path, block: _Block) -> Columns:
    """The columns of whole lines."""
    with path.open("rb") as file:
        file.seek(block.begin)
        lines = file.read(block.num_bytes)
    rows, problems = parse_rows(lines, block.first_line)
    found = defaultdict[Group, "_Growing"](_Growing)
    for place, row in enumerate(rows):
        found["bytes_sent",].add(place, row.bytes_sent)
        found["utilisation",].add(place, row.utilisation)
        if row.mode is not None:  # there was a batch
            found["bound",].add(place, {row.bound or REQUEST: 1})
        for rank, steps in row.rank_seconds.items():
            found["rank_seconds", rank].add(place, steps)
        for rank, figures in row.resources.items():
            found["resources", rank].add(place, figures)
        if row.elapsed_seconds is None:  # of a version that had no clock
            found["seconds",].add(place, row.seconds)
        for loss in row.step_losses:
            found["step_losses",].add(place, {"loss": np.nan if loss is None else loss})
    return Columns(
        rounds=np.array([row.round for row in rows], np.int64),
        trainers=np.array([row.trainer for row in rows], np.int64),
        numbers=_numbers_of(rows),
        grouped={group: growing.columns() for group, growing in found.items()},
        told=list(_told(rows)),
        problems=problems,
        num_lines=block.num_lines,
        num_bytes=block.num_bytes,
    )


def _numbers_of(rows: Sequence[TrainerRow]) -> dict[str, Values]:
    """NUMBERS and GRADIENT_NORM of every row."""
    squares = [(row.statistics or {}).get("squared_norm") or 0.0 for row in rows]
    norms = [math.sqrt(square) if square > 0 else None for square in squares]
    columns = {name: [getattr(row, name) for row in rows] for name in NUMBERS} | {GRADIENT_NORM: norms}
    return {name: np.array(column, np.float64) for name, column in columns.items()}  # which makes None NaN


def _told(rows: Sequence[TrainerRow]) -> Iterator[TrainerRow]:
    """Those that have more to tell than numbers, and the first of every trainer."""
    seen = set[int]()
    for row in rows:
        if row.merge or row.notes or row.nonfinite_workers or (row.round and row.trainer not in seen):
            yield row
        if row.round:
            seen.add(row.trainer)


class _Growing(defaultdict[str | int, tuple[list[int], list[float]]]):
    """Columns of a group, to which rows add."""

    def __init__(self) -> None:
        super().__init__(lambda: ([], []))

    def add(self, place: int, numbers: Mapping[str, Number] | Mapping[int, Number]) -> None:
        """Add those of a row that are known."""
        for key, number in numbers.items():
            if number is not None:
                rows, values = self[key]
                rows.append(place)
                values.append(number)

    def columns(self) -> Mapping[str | int, Column]:
        """What was added."""
        return {
            key: Column(np.array(rows, np.int64), np.array(values, np.float64)) for key, (rows, values) in self.items()
        }


def _joined(parts: Sequence[Columns]) -> Columns:
    """The rows of one part after the other's."""
    grouped = defaultdict[Group, dict[str | int, list[Column]]](dict)
    begin = 0
    for part in parts:
        for group, columns in part.grouped.items():
            for key, column in columns.items():
                grouped[group].setdefault(key, []).append(Column(column.rows + begin, column.values))
        begin += len(part.rounds)
    return Columns(
        rounds=np.concatenate([part.rounds for part in parts]),
        trainers=np.concatenate([part.trainers for part in parts]),
        numbers={name: np.concatenate([part.numbers[name] for part in parts]) for name in parts[0].numbers},
        grouped={
            group: {
                key: Column(
                    np.concatenate([column.rows for column in columns]),
                    np.concatenate([column.values for column in columns]),
                )
                for key, columns in of_group.items()
            }
            for group, of_group in grouped.items()
        },
        told=list(_told([row for part in parts for row in part.told])),
        problems=[problem for part in parts for problem in part.problems],
        num_lines=sum(part.num_lines for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
    )
