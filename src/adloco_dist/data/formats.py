"""The formats that hold rows: JSON lines, csv, parquet, as streams of bytes.

Every row has a number, counted from 0 over all rows of its file, those that cannot be read included: it is the same
wherever reading begins and whatever is left out. Readers yield damaged rows, too; the caller decides what becomes of
them. An exception means that nothing more can be read.
"""

import csv
import io
import json
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, BinaryIO

from adloco_dist.text import reason

ROWS_PER_CALL = 1024
"""Rows of a parquet file that are converted to Python's objects at one time."""
LONGEST_FIELD = 1 << 27
"""Maximum length of a csv field; a quote that nothing closes is reported there at the latest."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row that was read."""

    number: int
    content: dict[str, Any]
    """Values by column."""
    line: int | None = None
    """Where it begins, counted from 1 as editors do; parquet has no lines."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Rows that cannot be read."""

    number: int
    """Number of the first of them."""
    reason: str
    line: int | None = None
    count: int | None = 1
    """Number of rows; None: all from `number` on."""


def place_of(row: Row | Damage) -> str:
    """Where a row is, or the first of those that cannot be read."""
    return f"row {row.number}" if row.line is None else f"row {row.number}, line {row.line}"


def json_rows(content: BinaryIO, first_row: int) -> Iterator[Row | Damage]:
    """Read rows from lines, from `first_row` on, or all rows of a file that is one array."""
    first = content.readline().removeprefix(BOM_UTF8)
    if first.lstrip().startswith(b"["):
        whole = first + content.read()
        rows = _array(whole)
        if rows is not None:
            yield from rows
            return
        content = io.BytesIO(whole)
        first = content.readline()
    number = 0
    for line_number, line in enumerate(chain([first], content), 1):
        if not line.strip():
            continue
        if number >= first_row:
            try:
                yield _object(number, _parsed(line), line_number)
            except json.JSONDecodeError as error:
                yield Damage(number, f"{error.msg} at column {error.colno}", line_number)
            except (ValueError, RecursionError) as error:
                yield Damage(number, reason(error), line_number)
        number += 1


def _array(whole: bytes) -> list[Row | Damage] | None:
    """The rows of a file that is one array of objects; None: it is something else."""
    try:
        contents = _parsed(whole)
    except (ValueError, RecursionError):
        return None
    if not isinstance(contents, list) or not any(isinstance(content, dict) for content in contents):
        return None
    return [_object(number, content, None) for number, content in enumerate(contents)]


def _object(number: int, content: Any, line: int | None) -> Row | Damage:
    if isinstance(content, dict):
        return Row(number, content, line)
    return Damage(number, f"holds {type(content).__name__}, must be an object with columns", line)


def _parsed(text: bytes) -> Any:
    """A value of JSON, whose text can be encoded again; raises a ValueError where it is not JSON or not UTF-8, or an
    object has a key twice, and a RecursionError where it is nested too deeply."""
    value = json.loads(text.decode(), object_pairs_hook=_unique)
    if b"\\ud" in text or b"\\uD" in text:  # half a surrogate pair is no character
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):  # nobody can say which of the values counts
        raise ValueError("a key is there twice")
    return content


def csv_rows(content: BinaryIO) -> Iterator[Row | Damage]:
    """Read rows from the first on, with the header's names; what a short row lacks is None."""
    # What is no UTF-8 is let through here, so that it damages one row; line ends inside quotes belong to the text.
    text = io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _records(text)
    finally:
        text.detach()  # `content` is its owner's to close


def _records(text: io.TextIOWrapper) -> Iterator[Row | Damage]:
    """Read rows; of a damaged one, the lines after its first are read again, because a quote that nothing closes takes
    all lines up to the next quote, or to the end of the file."""
    taken: list[str] = []  # the lines of the present row
    again: deque[str] = deque()

    def lines() -> Iterator[str]:
        while line := again.popleft() if again else text.readline():
            taken.append(line)
            yield line

    csv.field_size_limit(LONGEST_FIELD)  # books are longer than the module's own limit
    records = csv.reader(lines(), strict=True)
    header = next(filter(None, records), [])
    "".join(header).encode()
    _check_names(header)
    number, line_number = 0, 1
    while True:
        line_number += len(taken)
        taken.clear()
        record, lost = None, ""
        try:
            record = next(records, None)
            if record is None:
                return
            "".join(record).encode()
            if len(record) > len(header):
                lost = f"has {len(record)} fields, the header names {len(header)}"
        except csv.Error as error:
            lost = reason(error)
            again.extendleft(reversed(taken[1:]))
            del taken[1:]
            records = csv.reader(lines(), strict=True)
        except UnicodeEncodeError:
            lost = "is no UTF-8"
        if lost:
            yield Damage(number, lost, line_number)
        elif record:
            yield Row(number, dict(zip_longest(header, record)), line_number)
        number += bool(lost or record)  # an empty line is no row


def _check_names(names: Sequence[str]) -> None:
    """Raises a ValueError where two columns have the same name: nobody knows which is wanted. (Many may have none.)"""
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise ValueError(f"has several columns {', '.join(twice)}")


def parquet_rows(raw: BinaryIO, columns: Sequence[str], first_row: int) -> Iterator[Row | Damage]:
    """Read columns (all, where one is missing) by row groups, from that of `first_row` on; the rest of a damaged row
    group is lost."""
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(raw, page_checksum_verification=True)
    _check_names(table.schema_arrow.names)
    wanted = list(columns) if set(columns) <= set(table.schema_arrow.names) else None
    number = 0
    for group in range(table.num_row_groups):
        end = number + table.metadata.row_group(group).num_rows
        if end > first_row:
            lost = "holds fewer rows than it says"
            try:
                for batch in table.iter_batches(ROWS_PER_CALL, [group], wanted, use_threads=False):
                    for content in batch.to_pylist():
                        yield Row(number, content)
                        number += 1
            except Exception as error:  # pyarrow's own, OSError and others
                lost = reason(error)
            if number < end:
                yield Damage(number, f"row group {group}: {lost}", count=end - number)
        number = end
