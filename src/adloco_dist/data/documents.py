"""Documents with their labels, and files of rows that hold them: JSON lines, parquet, csv, here or on the hub.

Files are read one by one, so that a place in a corpus is a file and a row, and an error names both. `datasets` finds
the files of a data set of the hub; no row is downloaded before it is needed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any

from adloco_dist.config import Damaged, DataSettings, SettingsError, require
from adloco_dist.data.encoding import Text, as_bytes
from adloco_dist.data.files import class_names, read_rows
from adloco_dist.data.foreign_tokens import LIST_COLUMNS, column_conversion
from adloco_dist.data.formats import Damage, Row, place_of
from adloco_dist.data.hub import fetching, split_subset
from adloco_dist.text import one_line

LOOKED_AT = 1000
"""Rows that are tried after a damaged first one, before a file counts as unreadable."""
NAMES = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
"""How a value that is not text is reported."""
MAX_CHARACTERS = 60
"""Maximum length of a value that is shown."""
UNREADABLE = "that cannot be read"
FORMATS = {"json": "JSON lines", "csv": "csv", "parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and in a labelled corpus its class: a number or a word."""

    text: Text
    label: int | str | None = None
    file: str = ""
    """The file of a row; empty for other documents."""
    row: int = 0
    """Number of the row in that file."""


def hold_out(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on, in their order, and `fraction` of them to hold out, at least one; no text is in both. The
    choice depends only on the texts, not on where a node keeps its files or in which order."""
    ordered = sorted(documents, key=_content_key)
    held_out = ordered[: min(max(1, round(fraction * len(documents))), len(documents) - 1)]
    texts = {document.text for document in held_out}
    return [document for document in documents if document.text not in texts], held_out


def _content_key(document: Document) -> bytes:
    return hashlib.sha256(as_bytes(document.text)).digest()


def class_of(document: Document, names: Sequence[str]) -> int:
    """The number of a document's class; raises a SettingsError where it is none of the classes."""
    label, count, place = document.label, len(names), f"row {document.row} of {document.file}"
    assert label is not None
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, str):
        detail = f"{place} has label {one_line(repr(label))}, which no training document has"
        raise SettingsError(f"data.label_column: {detail}; its labels are {one_line(', '.join(names))}")
    rule = f"{place} has label {label}; labels go from 0 to {count - 1}, or set more classes"
    require(0 <= label < count, "data.num_labels", count, rule)
    return label


def find_labels(documents: Iterable[Document], data: DataSettings) -> list[str]:
    """The names of the training documents' classes; raises a SettingsError where some are words, others numbers, or
    there is only one."""
    labels = {document.label for document in documents}
    words = sorted(label for label in labels if isinstance(label, str))
    rule = "some labels are words, others numbers; use one kind"
    require(len(words) in (0, len(labels)), "data.label_column", data.label_column, rule)
    count = data.num_labels or (len(words) if words else 1 + max(label for label in labels if isinstance(label, int)))
    has = f"the training documents have {max(len(words), count)} classes"
    rule = f"{has}; there must be two at least, all of them counted"
    require(count >= max(2, len(words)), "data.num_labels", data.num_labels, rule)
    return words + [str(number) for number in range(len(words), count)]


@dataclass
class LeftOut:
    """What was left out of a corpus, reported once for each file and cause however often the file is read. Several
    threads may add to it."""

    rows: defaultdict[tuple[str, str], dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """By file and cause: the numbers of the rows that were left out, and their places."""
    files: dict[str, str] = field(default_factory=dict)
    """Lines about files that cannot be read to their end, or not at all."""
    _reported: dict[str | tuple[str, str], str] = field(default_factory=dict)
    """Lines that were reported, by the keys of `rows` and `files`."""

    def add(self, file: str, cause: str, number: int, place: str, count: int = 1) -> None:
        """Note rows, whether or not they were noted before; `place` says where the first of them is."""
        self.rows[file, cause].update(dict.fromkeys(range(number, number + count), place))

    def take(self) -> list[str]:
        """A line for each file and cause with more rows than at the last call, and for each new file."""
        lines: dict[str | tuple[str, str], str] = {}
        for (file, cause), rows in list(self.rows.items()):
            places = dict(rows)
            lines[file, cause] = f"{file}: left out {len(places)} row(s) {cause}; the first is {places[min(places)]}"
        lines |= self.files
        new = [line for key, line in lines.items() if self._reported.get(key) != line]
        self._reported |= lines
        return new


@dataclass(frozen=True)
class RowFiles:
    """Files that hold a document in every row."""

    setting: str
    """The setting that names them, for reports."""
    files: tuple[str, ...]
    format: str
    """json, parquet or csv."""
    data: DataSettings
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def maximum(self) -> int | None:
        """Maximum number of documents that are read of all files together; None: all."""
        return self.data.validation_documents if self.setting == "data.validation" else self.data.sample

    def documents(self) -> Iterator[Document]:
        """The documents of all files, in order."""
        return islice((document for file in self.files for document in self.of_file(file)), self.maximum)

    def of_file(self, file: str, first_row: int = 0) -> Generator[Document]:
        """The documents of one file, from a row on. A row keeps its number, whatever is left out before it. Raises a
        SettingsError where there is no such column, a row holds no text there, or the file or a row cannot be read
        (what data.damaged=skip leaves out, `take_notes` reports)."""
        if Path(file).is_file() and not Path(file).stat().st_size:
            return  # which some readers take for damage
        unseen, row = set() if first_row else set(self._columns), None
        for row in self._readable(file, first_row):
            unseen -= row.content.keys()
            column = next((column for column in self._columns if self._is_null(row.content.get(column))), None)
            if column is None:
                yield self._document(file, row)
            elif self.data.damaged is Damaged.refuse:
                raise SettingsError(self._null(file, row, column))
            else:
                self.left_out.add(file, f"where {self._columns[column]} is null", row.number, place_of(row))
        if row and unseen:
            setting = self._columns[min(unseen)]
            raise SettingsError(f"{setting}: {file} has no such column; it has {_names(row)}")

    def take_notes(self) -> list[str]:
        """What was left out since the last call, one line for each file and cause."""
        return [f"{self.setting}: {line}" for line in self.left_out.take()]

    @property
    def label_names(self) -> list[str] | None:
        """What a hub data set calls its classes; None: it does not say."""
        column = self.data.label_column
        return class_names(self.files[0], column) if column and self.format == "parquet" and self.files else None

    @cached_property
    def _columns(self) -> dict[str, str]:
        """The columns that a row must have, each with the setting that names it."""
        named = {"data.text_column": self.data.text_column, "data.label_column": self.data.label_column}
        return {column: f"{setting}={column}" for setting, column in named.items() if column is not None}

    def _readable(self, file: str, first_row: int) -> Generator[Row]:
        """The rows that can be read."""
        damage, is_readable = None, first_row > 0
        with closing(read_rows(self.setting, file, self.format, list(self._columns), first_row)) as rows:
            for row in rows:
                if isinstance(row, Row):
                    is_readable = True
                    yield row
                elif self.data.damaged is Damaged.refuse:
                    is_whole = not is_readable and not any(isinstance(more, Row) for more in islice(rows, LOOKED_AT))
                    detail = self._unreadable(file, row, is_whole and row.number == 0)
                    raise SettingsError(f"{self.setting}: {detail}; mend it, or set data.damaged=skip")
                elif row.count is None:
                    rest = "all of it" if row.number == 0 else "the rest"
                    line = f"{self._unreadable(file, row, row.number == 0)}: {rest} is left out"
                    self.left_out.files.setdefault(file, line)
                else:
                    damage = damage or row
                    self.left_out.add(file, UNREADABLE, row.number, f"{place_of(row)} ({row.reason})", row.count)
        if damage and not is_readable:
            self.left_out.files.setdefault(file, f"{self._unreadable(file, damage, True)}: all of it is left out")
            self.left_out.rows.pop((file, UNREADABLE), None)

    def _unreadable(self, file: str, damage: Damage, is_whole: bool) -> str:
        if is_whole:
            place = "" if damage.line is None else f"line {damage.line}: "
            return f"{file} cannot be read as {FORMATS[self.format]} ({place}{damage.reason})"
        place = f"after row {damage.number - 1}" if damage.count is None else f"at {place_of(damage)}"
        return f"{file} cannot be read {place} ({damage.reason})"

    def _is_null(self, value: Any) -> bool:
        """Whether a value is null: also NaN, which writers of tables put for it, and an empty field of a csv."""
        return value is None or (isinstance(value, float) and isnan(value)) or (self.format == "csv" and value == "")

    def _null(self, file: str, row: Row, column: str) -> str:
        """What is wrong with a row that has no value in a column, and what to do."""
        skip = "or leave such rows out with data.damaged=skip"
        if column in row.content:
            return f"{self._columns[column]}: {place_of(row)} of {file} is null; mend it, {skip}"
        ids = next((name for name in LIST_COLUMNS if isinstance(row.content.get(name), list)), None)
        convert = ids and column_conversion(file, self.format, ids, row.content[ids])
        detail = f"{place_of(row)} of {file} has no such column; it has {_names(row)}"
        return f"{self._columns[column]}: {detail}; {convert or f'name another, {skip}'}"

    def _document(self, file: str, row: Row) -> Document:
        text, place = row.content[self.data.text_column], f"{place_of(row)} of {file}"
        if not isinstance(text, str):
            kind = NAMES.get(type(text), type(text).__name__)
            rule = column_conversion(file, self.format, self.data.text_column, text) or "it must be text"
            raise SettingsError(f"data.text_column={self.data.text_column}: {place} holds {kind}; {rule}")
        if self.data.label_column is None:
            return Document(text, None, file, row.number)
        label = row.content[self.data.label_column]
        if self.format == "csv" and label.strip().lstrip("+-").isdecimal():
            label = int(label)
        if not isinstance(label, int | str) or label == "":
            detail = f"{place} holds {one_line(repr(label), MAX_CHARACTERS)}"
            raise SettingsError(f"data.label_column={self.data.label_column}: {detail}; it must be a number or a word")
        return Document(text, int(label) if isinstance(label, bool) else label, file, row.number)


def _names(row: Row) -> str:
    return one_line(", ".join(map(str, row.content))) or "none"


def hub_files(data: DataSettings) -> tuple[RowFiles, RowFiles]:
    """The files of a data set's splits for training and validation; none of them is downloaded; raises a SettingsError
    where the hub cannot be reached, or there is no such data set, subset or split."""
    import datasets  # two seconds, which most corpora do not need
    from datasets import config

    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else the hub is notified of every data set, which takes seconds
    remedy = "name a folder with a copy of it, or take the corpus that needs no network, data=python_stdlib"
    with fetching("data.hub", str(data.hub), remedy):
        name, subset, revision = split_subset(str(data.hub))
        builder = datasets.load_dataset_builder(name, subset, revision=revision)
    files_of_splits = builder.config.data_files or {}
    file_format = type(builder).__module__.rpartition(".")[2]
    rule = f"has files of kind {file_format}; must be json, parquet or csv"
    require(file_format in FORMATS, "data.hub", data.hub, rule)

    def files_of(setting: str, splits: Sequence[str]) -> RowFiles:
        for split in splits:
            rule = f"{data.hub} has no such split; it has {', '.join(map(str, files_of_splits))}"
            require(split in files_of_splits, setting, split, rule)
        files = tuple(str(file) for split in splits for file in files_of_splits[split])
        return RowFiles(setting, files, file_format, data)

    return files_of("data.train", data.train), files_of("data.validation", data.validation)
