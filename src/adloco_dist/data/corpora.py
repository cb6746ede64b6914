"""What a run is trained on: documents or token files, made into sequences, split into training and validation.

A corpus is the same on every rank or the run does not start: its digest is compared.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adloco_dist.config import OF_ROWS, Corpus, DataSettings, Packing, SettingsError
from adloco_dist.data.documents import Document, RowFiles, hub_files, local_files
from adloco_dist.data.embedded import library_sources, package_snippets
from adloco_dist.data.encoding import Encoder, Vocabulary, load_encoder, load_tokenizer
from adloco_dist.data.files import expand
from adloco_dist.data.indexed import IndexedDataset
from adloco_dist.data.labels import Labels, find_labels
from adloco_dist.data.order import by_content
from adloco_dist.data.row_streams import RowStreams
from adloco_dist.data.splits import Splits
from adloco_dist.data.streams import StreamDataset
from adloco_dist.data.text_files import TextFiles
from adloco_dist.data.token_files import TokenFiles, open_folder, open_plain, split_tail
from adloco_dist.data.tokens import DocumentTable, TextTable, TokenTable


@dataclass(frozen=True, kw_only=True)
class TextSplits(Splits):
    """Training and validation sequences of a corpus of text, as token ids."""

    validation: TextTable
    table: TextTable | None
    """The training sequences by number; None: a stream's cannot be read in any order."""
    vocabulary: Vocabulary
    labels: Labels | None = None
    """Classes of a labelled corpus; None: the corpus has none."""

    @property
    def num_labels(self) -> int | None:
        return len(self.labels.names) if self.labels else None

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "validation_tokens": self.validation.num_tokens,
            "vocab_size": self.vocabulary.size,
            "labels": self.labels and self.labels.names,
        }


def indexed_splits(
    table: TextTable, validation: TextTable, vocabulary: Vocabulary, source: str, digest: str = "",
    labels: Labels | None = None, notes: Sequence[str] = (),
) -> TextSplits:  # fmt: skip
    """The splits of a corpus whose training sequences are read by number.

    Args:
        digest: digest of both splits.
    """
    return TextSplits(
        train=IndexedDataset(table, digest), validation=validation, table=table, vocabulary=vocabulary, source=source,
        labels=labels, notes=tuple(notes),
    )  # fmt: skip


def load_corpus(data: DataSettings, seed: int = 0) -> TextSplits:
    """Read and split the corpus that `data` names.

    Args:
        seed: seed of the order in which streams read files.

    Raises:
        SettingsError: no such file, unreadable, empty, damaged, or too short for one sequence of each split.
    """
    if data.corpus is Corpus.tokens:
        splits = _of_tokens(data)
    elif data.streaming:
        splits = _of_streams(data, seed)
    else:
        splits = _of_documents(data)
    for name, table in (("train", splits.table), ("validation", splits.validation)):
        if table is not None and not table.num_sequences:
            tokens, unit = table.num_tokens, f"less than one sequence of {data.sequence_length} + 1"
            raise SettingsError(
                f"data.sequence_length={data.sequence_length}: the {name} split ({splits.source}) has {tokens} tokens, "
                f"{unit}; use more text or shorter sequences"
            )
    return splits


def _of_tokens(data: DataSettings) -> TextSplits:
    train = _open_tokens("data.train", data.train)
    held_out = _open_tokens("data.validation", data.validation) if data.validation else None
    max_id = max(train.max_id, held_out.max_id if held_out else 0)
    known = train.manifest
    size = data.vocab_size or (known.vocab_size if known else max_id + 1)
    if max_id >= size:
        detail = f"{data.train[0]} holds id {max_id}; set at least {max_id + 1}"
        raise SettingsError(f"data.vocab_size={size}: {detail}")
    vocabulary = Vocabulary(size)
    if known and known.tokenizer and train.folder:
        tokenizer = load_tokenizer("data.train", str(train.folder / known.tokenizer))
        vocabulary = replace(Vocabulary.of(tokenizer), size=size)
    parts, rest = (train.parts, held_out.parts) if held_out else split_tail(train.parts, data.validation_fraction)
    digest = hashlib.sha256(f"{train.digest}{held_out.digest if held_out else data.validation_fraction}".encode())
    return indexed_splits(
        TokenTable(parts, data.sequence_length),
        TokenTable(rest, data.sequence_length),
        vocabulary,
        f"{len(train.parts)} token file(s)",
        digest.hexdigest(),
    )


def _open_tokens(setting: str, names: Sequence[str]) -> TokenFiles:
    if len(names) == 1 and Path(names[0]).is_dir():
        return open_folder(setting, Path(names[0]))
    return open_plain(setting, expand(setting, names))


def _of_streams(data: DataSettings, seed: int) -> TextSplits:
    """A corpus that is read while training; its validation documents are read now."""
    train, held_out = row_files_of(data)
    encoder = load_encoder(data)
    numbered = [str(number) for number in range(data.num_labels or 0)]
    labels = Labels(tuple(train.label_names or numbered)) if data.is_labelled else None
    documents = _read(held_out)
    validation = _table(data, documents, encoder, labels)
    if train.is_empty():
        raise SettingsError(f"data.train={','.join(data.train)}: holds no document; name files that are not empty")
    detail = {"files": [[Path(file).name, _size(file)] for file in train.files], "encoder": encoder.digest}
    digest = hashlib.sha256(f"{json.dumps(detail)}{validation.digest}".encode()).hexdigest()
    rows = RowStreams(train, encoder, labels, data.sequence_length, data.packing, seed)
    return TextSplits(
        train=StreamDataset(rows, digest),
        validation=validation,
        table=None,
        vocabulary=encoder.vocabulary,
        source=f"{len(train.files)} {train.format} file(s), streamed",
        labels=labels,
        notes=(*held_out.take_notes(), *encoder.take_notes()),
    )


def _of_documents(data: DataSettings) -> TextSplits:
    """A corpus that is read as a whole."""
    encoder, names, notes = load_encoder(data), None, []
    if data.corpus is Corpus.python_packages:
        train, validation, names = package_snippets(data.validation_fraction)
        train = train[: data.sample]
        source = f"{len(train) + len(validation)} pieces of {len(names)} packages of Python's standard library"
    elif data.corpus in OF_ROWS:
        files = row_files_of(data)
        train, validation = (_read(part) for part in files)
        names, notes = files[0].label_names, [note for part in files for note in part.take_notes()]
        source = f"{len(train)} rows of {len(files[0].files)} {files[0].format} file(s)"
    else:
        texts = text_files_of(data)
        train, validation = map(_contents, texts)
        notes = [note for part in texts for note in part.take_notes()]
        kind = "text file(s)" if data.corpus is Corpus.text else "modules of Python's standard library"
        source = f"{len(train)} {kind}"
    for setting, named, documents in (("train", data.train, train), ("validation", data.validation, validation)):
        if named and not documents:
            raise SettingsError(f"data.{setting}={','.join(named)}: holds no document; name files that are not empty")
    labels = find_labels(train, names, data) if data.is_labelled else None
    if not validation and len(train) == 1 and data.packing is Packing.packed and not labels:
        (tokens,) = encoder.encode([train[0].text])
        parts, rest = split_tail([tokens], data.validation_fraction)
        tables: list[TextTable] = [TokenTable(part, data.sequence_length) for part in (parts, rest)]
    else:
        if not validation:
            train, validation = _held_out(train, data)
        tables = [_table(data, part, encoder, labels) for part in (train, validation)]
    digest = hashlib.sha256("".join(table.digest for table in tables).encode()).hexdigest()
    return indexed_splits(
        tables[0], tables[1], encoder.vocabulary, source, digest, labels, [*notes, *encoder.take_notes()]
    )


def row_files_of(data: DataSettings) -> tuple[RowFiles, RowFiles]:
    """The files of a corpus of rows, for training and validation; the second may be none.

    Raises:
        SettingsError: there are no such files.
    """
    if data.corpus is Corpus.hub:
        return hub_files(data)
    named = {"data.train": data.train, "data.validation": data.validation}
    train, validation = (local_files(setting, expand(setting, files), data) for setting, files in named.items())
    return train, validation


def _read(files: RowFiles) -> list[Document]:
    return [document for document in files.documents() if document.text]


def text_files_of(data: DataSettings) -> tuple[TextFiles, TextFiles]:
    """The files of a corpus of text files, for training and validation; the second may be none.

    Raises:
        SettingsError: there are no such files.
    """
    if data.corpus is Corpus.python_stdlib:
        train = TextFiles.of("data.corpus", library_sources()[: data.sample], data)
    else:
        train = TextFiles.of("data.train", expand("data.train", data.train)[: data.sample], data)
    return train, TextFiles.of("data.validation", expand("data.validation", data.validation), data)


def _contents(files: TextFiles) -> list[Document]:
    documents = list(files.documents())
    if files.files and not documents:
        detail = f"{files.setting}={files.files[0]}: holds no text; name files that are not empty"
        raise SettingsError("; ".join([detail, *files.take_notes()]))
    return documents


def _held_out(documents: Sequence[Document], data: DataSettings) -> tuple[list[Document], list[Document]]:
    _, texts = by_content([document.text for document in documents], data.validation_fraction)
    chosen = set(texts)
    by_text = {document.text: document for document in documents}
    rule = f"all {len(documents)} documents have the text of one that is held out; name data.validation, or more text"
    is_rest = len(documents) < 2 or any(document.text not in chosen for document in documents)
    if not is_rest:
        raise SettingsError.of("data.validation_fraction", data.validation_fraction, rule)
    return [document for document in documents if document.text not in chosen], [by_text[text] for text in texts]


def _table(data: DataSettings, documents: Sequence[Document], encoder: Encoder, labels: Labels | None) -> TextTable:
    """Documents as sequences."""
    texts = [document.text for document in documents]
    pad = encoder.vocabulary.pad
    if labels is not None:
        numbers = [labels.number(document, document.place) for document in documents]
        return DocumentTable(encoder.encode(texts, data.sequence_length), pad, np.array(numbers, dtype=np.int64))
    if data.packing is Packing.document:
        tokens = encoder.encode(texts, data.sequence_length + 1)
        return DocumentTable([ids for ids in tokens if len(ids) > 1], pad)
    return TokenTable([np.concatenate(encoder.encode(texts))] if texts else [], data.sequence_length)


def _size(file: str) -> int | None:
    return Path(file).stat().st_size if Path(file).is_file() else None
