"""What a run is trained on: documents or token files, made into sequences, split into training and validation.

A corpus is the same on every rank or the run does not start: its digest is compared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adloco_dist.config import OF_ROWS, Corpus, DataSettings, Packing, SettingsError, require
from adloco_dist.data.documents import Document, RowFiles, class_of, find_labels, hold_out, hub_files
from adloco_dist.data.encoding import Encoder, Vocabulary, load_encoder, load_tokenizer
from adloco_dist.data.files import expand
from adloco_dist.data.indexed import IndexedDataset
from adloco_dist.data.items import joined_digest
from adloco_dist.data.protocols import Splits
from adloco_dist.data.row_streams import RowStreams
from adloco_dist.data.streams import StreamDataset
from adloco_dist.data.text_files import TextFiles, library_sources, package_snippets
from adloco_dist.data.token_files import open_tokens, split_tail
from adloco_dist.data.tokens import DocumentTable, TextTable, TokenTable
from adloco_dist.text import one_line

STDLIB = "modules of Python's standard library"
NO_DOCUMENT = "holds no document; name files that are not empty"


@dataclass(frozen=True, kw_only=True)
class TextSplits(Splits):
    """Training and validation sequences of a corpus of text, as token ids."""

    validation: TextTable
    table: TextTable | None
    """The training sequences by number; None: a stream's cannot be read in any order."""
    vocabulary: Vocabulary
    labels: tuple[str, ...] | None = None
    """Names of the classes of a labelled corpus; None: the corpus has none."""

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "validation_tokens": self.validation.num_tokens,
            "vocab_size": self.vocabulary.size,
            "labels": self.labels,
        }


def indexed_splits(
    table: TextTable, validation: TextTable, vocabulary: Vocabulary, source: str, digest: str = ""
) -> TextSplits:
    """The splits of a corpus, with the digest of both, whose training sequences are read by number."""
    train = IndexedDataset(table, digest)
    return TextSplits(train=train, validation=validation, table=table, vocabulary=vocabulary, source=source)


def load_corpus(data: DataSettings, seed: int = 0) -> TextSplits:
    """Read and split the corpus that `data` names, streams in an order of files by the seed; raises a SettingsError
    where there is no such file, or it is unreadable, empty, damaged, or too short for one sequence of each split."""
    if data.corpus is Corpus.tokens:
        splits = _of_tokens(data)
    elif data.streaming:
        splits = _of_streams(data, seed)
    else:
        splits = _of_documents(data)
    length = data.sequence_length
    for name, table in (("train", splits.table), ("validation", splits.validation)):
        if table is not None and not table.num_sequences:
            has = f"has {table.num_tokens} tokens, less than one sequence of {length} + 1"
            rule = f"the {name} split ({splits.source}) {has}; use more text or shorter sequences"
            raise SettingsError.of("data.sequence_length", length, rule)
    return splits


def _of_tokens(data: DataSettings) -> TextSplits:
    train = open_tokens("data.train", data.train)
    held_out = open_tokens("data.validation", data.validation) if data.validation else None
    max_id = max(train.max_id, held_out.max_id if held_out else 0)
    size = max_id + 1 if train.vocab_size is None else train.vocab_size
    rule = f"holds id {max_id}, but its vocabulary has {size} by {data.train[0]}; make both with one tokenizer"
    require(max_id < size, "data.validation", ",".join(data.validation), rule)
    vocabulary = Vocabulary(size)
    if train.tokenizer:
        vocabulary = replace(Vocabulary.of(load_tokenizer("data.train", str(train.tokenizer))), size=size)
    parts, rest = (train.parts, held_out.parts) if held_out else split_tail(train.parts, data.validation_fraction)
    digest = joined_digest(train.digest, held_out.digest if held_out else data.validation_fraction)
    table, validation = (TokenTable(split, data.sequence_length) for split in (parts, rest))
    return indexed_splits(table, validation, vocabulary, f"{len(train.parts)} token file(s)", digest)


def _of_streams(data: DataSettings, seed: int) -> TextSplits:
    """A corpus that is read while training; its validation documents are read now."""
    train, held_out = files_of(data)
    assert isinstance(train, RowFiles)
    encoder = load_encoder(data)
    numbered = [str(number) for number in range(data.num_labels or 0)]
    labels = tuple(train.label_names or numbered) if data.is_labelled else None
    validation = _table(data, _read(held_out), encoder, labels)
    require(next(train.documents(), None) is not None, "data.train", ",".join(data.train), NO_DOCUMENT)
    sizes = [[Path(file).name, Path(file).stat().st_size if Path(file).is_file() else None] for file in train.files]
    identity = json.dumps({"files": sizes, "encoder": encoder.digest})
    rows = RowStreams(train, encoder, labels, seed)
    return TextSplits(
        train=StreamDataset(rows, joined_digest(identity, validation.digest)),
        validation=validation,
        table=None,
        vocabulary=encoder.vocabulary,
        source=f"{len(train.files)} {train.format} file(s), streamed",
        labels=labels,
        notes=(*held_out.take_notes(), *encoder.take_notes()),
    )


def _of_documents(data: DataSettings) -> TextSplits:
    """A corpus that is read as a whole."""
    encoder, class_names, notes = load_encoder(data), None, []
    if data.corpus is Corpus.python_packages:
        train, validation, class_names = package_snippets(data.validation_fraction)
        train = train[: data.sample]
        num_pieces = len(train) + len(validation)
        source = f"{num_pieces} pieces of {len(class_names)} packages of Python's standard library"
    else:
        files = files_of(data)
        train, validation = map(_read, files)
        notes = [note for split in files for note in split.take_notes()]
        source = f"{len(train)} {'text file(s)' if data.corpus is Corpus.text else STDLIB}"
        if isinstance(files[0], RowFiles):
            class_names = files[0].label_names
            source = f"{len(train)} rows of {len(files[0].files)} {files[0].format} file(s)"
    labels = None
    if data.is_labelled:
        labels = tuple(find_labels(train, data) if class_names is None else class_names)
    if not validation and len(train) == 1 and data.packing is Packing.packed and not labels:
        (tokens,) = encoder.encode([train[0].text])
        parts = split_tail([tokens], data.validation_fraction)
        tables: list[TextTable] = [TokenTable(split, data.sequence_length) for split in parts]
    else:
        if not validation:
            num_documents = len(train)
            train, validation = hold_out(train, data.validation_fraction)
            rule = f"all {num_documents} documents have one text; name data.validation, or more text"
            require(bool(train) or num_documents < 2, "data.validation_fraction", data.validation_fraction, rule)
        tables = [_table(data, split, encoder, labels) for split in (train, validation)]
    table, held_out = tables
    digest = joined_digest(table.digest, held_out.digest)
    splits = indexed_splits(table, held_out, encoder.vocabulary, source, digest)
    return replace(splits, labels=labels, notes=(*notes, *encoder.take_notes()))


def files_of(data: DataSettings) -> tuple[RowFiles, RowFiles] | tuple[TextFiles, TextFiles]:
    """The files of a corpus of rows or text files, for training and validation; the second may be none; raises a
    SettingsError where there are no such files."""
    if data.corpus is Corpus.hub:
        return hub_files(data)
    is_library = data.corpus is Corpus.python_stdlib
    train = library_sources() if is_library else expand("data.train", data.train)
    validation = expand("data.validation", data.validation)
    train, validation = tuple(map(str, train)), tuple(map(str, validation))
    if data.corpus in OF_ROWS:
        of_rows = RowFiles("data.train", train, data.corpus.name, data)
        return of_rows, RowFiles("data.validation", validation, data.corpus.name, data)
    of_text = TextFiles("data.corpus" if is_library else "data.train", train[: data.sample], data)
    return of_text, TextFiles("data.validation", validation, data)


def _read(files: RowFiles | TextFiles) -> list[Document]:
    documents = [document for document in files.documents() if document.text]
    if files.files and not documents:
        line = f"{files.setting}={','.join(files.files)}: {NO_DOCUMENT}"
        raise SettingsError("; ".join([one_line(line), *files.take_notes()]))
    return documents


def _table(
    data: DataSettings, documents: Sequence[Document], encoder: Encoder, labels: Sequence[str] | None
) -> TextTable:
    """Documents as sequences."""
    texts = [document.text for document in documents]
    pad = encoder.vocabulary.pad
    if labels is not None:
        numbers = [class_of(document, labels) for document in documents]
        return DocumentTable(encoder.encode(texts, data.sequence_length), pad, np.array(numbers, dtype=np.int64))
    if data.packing is Packing.document:
        tokens = encoder.encode(texts, data.sequence_length + 1)
        return DocumentTable([ids for ids in tokens if len(ids) > 1], pad)
    return TokenTable([np.concatenate(encoder.encode(texts))] if texts else [], data.sequence_length)
