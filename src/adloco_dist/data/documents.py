"""Documents from files of rows: JSON lines, parquet, csv, here or on the Hugging Face hub, read through `datasets`.

`datasets` finds a data set's files, streams them (a row is never downloaded before it is wanted), decompresses and
retries. Files are read one by one, so that a place in a corpus is a file and a row, and damage has a name.
"""

import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from gzip import BadGzipFile, GzipFile
from itertools import islice
from pathlib import Path
from typing import Any

from adloco_dist.config import Damaged, DataSettings, SettingsError
from adloco_dist.data.encoding import Text
from adloco_dist.data.hub import fetching


class _UnreadableError(Exception):
    """Of whatever kind the cause is."""


@dataclass(frozen=True)
class Document:
    """A text, and of a labelled corpus its class: a number, or a word."""

    text: Text
    label: int | str | None = None


@dataclass(frozen=True)
class RowFiles:
    """Files that hold a document in every row."""

    setting: str
    """Which names them, for what is told."""
    files: tuple[str, ...]
    format: str
    """json, parquet or csv."""
    data: DataSettings
    most: int | None = None
    """Documents that are read of all files together; None: all."""
    skipped: list[str] = field(default_factory=list)
    """What was left out of damaged files, one line each."""

    def documents(self) -> Iterator[Document]:
        """Of all files, in order."""
        return islice((document for file in self.files for document in self.of_file(file)), self.most)

    def of_file(self, file: str, first_row: int = 0) -> Generator[Document]:
        """The documents of one file, from a row on.

        Raises:
            SettingsError: there is no such column, a row holds no text there, or the file cannot be read to its end
                (with data.damaged=skip, what can be read is all).
        """
        if Path(file).is_file() and not Path(file).stat().st_size:
            return  # which some readers take for damage
        row = first_row
        rows = self._contents(file, first_row)
        try:
            for content in rows:
                yield self._document(file, row, content)
                row += 1
        except _UnreadableError as error:
            self._damaged(file, row, error)

    def is_empty(self) -> bool:
        """Whether there is no document; only the first is read."""
        for file in self.files:
            documents = self.of_file(file)
            first = next(documents, None)
            documents.close()
            if first is not None:
                return False
        return True

    @cached_property
    def label_names(self) -> list[str] | None:
        """What a hub data set calls its classes; None: it does not say."""
        if self.data.label_column is None or not self.files:
            return None
        features = self._rows(self.files[0], 0).features
        return getattr(features.get(self.data.label_column), "names", None) if features else None

    def _contents(self, file: str, first_row: int) -> Iterator[dict[str, Any]]:
        """A file's rows; whatever goes wrong is told apart from what the taker of a row finds wrong."""
        try:  # every reader has exceptions of its own
            yield from self._rows(file, first_row)
        except Exception as error:
            raise _UnreadableError from error

    def _rows(self, file: str, first_row: int) -> Any:
        import datasets  # two seconds, which most corpora do not need
        from datasets import config

        datasets.disable_progress_bars()
        config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else the hub is told of every file, which takes seconds
        rows = datasets.load_dataset(self.format, data_files=[file], split="train", streaming=True)
        return rows.skip(first_row) if first_row else rows

    def _document(self, file: str, row: int, content: dict[str, Any]) -> Document:
        text = self._value(file, content, "text_column", self.data.text_column)
        if not isinstance(text, str):
            told = f"row {row} of {file} holds {type(text).__name__} there"
            raise SettingsError(f"data.text_column={self.data.text_column}: {told}; it must be text")
        if self.data.label_column is None:
            return Document(text)
        label = self._value(file, content, "label_column", self.data.label_column)
        if not isinstance(label, int | str) or label == "":
            told = f"row {row} of {file} holds {label!r} there"
            raise SettingsError(f"data.label_column={self.data.label_column}: {told}; it must be a number or a word")
        return Document(text, int(label) if isinstance(label, bool) else label)

    def _value(self, file: str, content: dict[str, Any], setting: str, column: str) -> Any:
        if column not in content:
            has = ", ".join(map(str, content))
            raise SettingsError(f"data.{setting}={column}: {file} has no such column; it has {has}")
        return content[column]

    def _damaged(self, file: str, row: int, error: Exception) -> None:
        place = f"after row {row}{_offset(file)}"
        reason = " ".join(str(_root(error)).split())[:200] or type(error).__name__
        told = f"{self.setting}: {file} cannot be read {place} ({reason})"
        if self.data.damaged is Damaged.refuse:
            raise SettingsError(f"{told}; mend it, or set data.damaged=skip") from error
        self.skipped.append(f"{told}: the rest is left out")


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _offset(file: str) -> str:
    """Where in a gzip file on this machine decompression fails, in words."""
    if not file.endswith(".gz") or not Path(file).is_file():
        return ""
    with Path(file).open("rb") as raw, GzipFile(fileobj=raw) as content:
        try:
            while content.read(1 << 16):
                pass
        except (EOFError, BadGzipFile, zlib.error, OSError):
            return f", at byte {raw.tell()} of {Path(file).stat().st_size}"
    return ""


def hub_files(data: DataSettings) -> tuple[RowFiles, RowFiles]:
    """The files of a data set's splits for training and validation; none of them is downloaded.

    Raises:
        SettingsError: the hub cannot be reached, or there is no such data set, subset or split.
    """
    import datasets

    remedy = "name a folder with a copy of it, or take the corpus that needs no network, data=python_stdlib"
    with fetching("data.hub", str(data.hub), remedy):
        builder = datasets.load_dataset_builder(str(data.hub), data.subset, revision=data.revision)
    found = builder.config.data_files or {}
    format = type(builder).__module__.rpartition(".")[2]
    if format not in {"json", "parquet", "csv"}:
        raise SettingsError(f"data.hub={data.hub}: has files of kind {format}; must be json, parquet or csv")
    chosen = {}
    for setting, splits in (("data.train", data.train), ("data.validation", data.validation)):
        for split in splits:
            if split not in found:
                has = ", ".join(map(str, found))
                raise SettingsError(f"{setting}={split}: {data.hub} has no such split; it has {has}")
        files = tuple(str(file) for split in splits for file in found[split])
        chosen[setting] = RowFiles(setting, files, format, data, most=_most(setting, data))
    return chosen["data.train"], chosen["data.validation"]


def local_files(setting: str, paths: Sequence[Path], data: DataSettings) -> RowFiles:
    """Files of rows on this machine."""
    return RowFiles(setting, tuple(map(str, paths)), data.corpus.name, data, most=_most(setting, data))


def _most(setting: str, data: DataSettings) -> int | None:
    return data.validation_documents if setting == "data.validation" else None
