"""What a run is trained on: documents or token files, made into sequences, split into training and validation.

A corpus is the same on every rank or the run does not start: its digest is compared.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adloco_dist.config import OF_ROWS, Corpus, DataSettings, Packing, SettingsError, require
from adloco_dist.data.documents import Document, RowFiles, hub_files, local_files
from adloco_dist.data.embedded import library_sources, package_snippets
from adloco_dist.data.encoding import Encoder, Vocabulary, load_encoder, load_tokenizer
from adloco_dist.data.files import expand
from adloco_dist.data.labels import Labels, find_labels
from adloco_dist.data.order import by_content
from adloco_dist.data.shards import Shard, deal
from adloco_dist.data.stream_shard import StreamShard, deal_streams
from adloco_dist.data.streams import RowStreams
from adloco_dist.data.token_files import TokenFiles, digest_of, open_folder, open_plain, split_tail
from adloco_dist.data.tokens import DocumentStore, Store, TokenStore
from adloco_dist.terminal import reason

TrainerShard = Shard | StreamShard


@dataclass(frozen=True)
class Splits:
    """Training and validation sequences of a corpus."""

    train: Store | RowStreams
    validation: Store
    vocabulary: Vocabulary
    source: str
    """What it was made of, for people."""
    digest: str
    """Equal digests mean the same training data."""
    labels: Labels | None = None
    """Of a labelled corpus."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it was read."""

    @property
    def num_labels(self) -> int | None:
        return len(self.labels.names) if self.labels else None

    @property
    def num_sequences(self) -> int | None:
        """To train on; None: a stream's are not counted."""
        return None if isinstance(self.train, RowStreams) else self.train.num_sequences

    def deal(self, num_trainers: int, workers_per_trainer: int, data: DataSettings, seed: int) -> list[TrainerShard]:
        """Every trainer's share of the training sequences, as a run begins."""
        if isinstance(self.train, RowStreams):
            return list(deal_streams(num_trainers, workers_per_trainer, data.shards))
        return list(deal(self.train.num_sequences, num_trainers, seed, data.shards))

    def restored(
        self, states: Mapping[int, Any], num_trainers: int, data: DataSettings, seed: int
    ) -> dict[int, TrainerShard]:
        """The trainers' shards of which `states` were taken.

        Args:
            num_trainers: with which the run began.
        """
        if isinstance(self.train, RowStreams):
            return {id: StreamShard.restored(state) for id, state in states.items()}
        dealt = dict(enumerate(deal(self.train.num_sequences, num_trainers, seed, data.shards)))
        return {id: Shard.restored(state, dealt) for id, state in states.items()}


def load_corpus(data: DataSettings, seed: int = 0) -> Splits:
    """Read and split the corpus that `data` names.

    Args:
        seed: of the order in which streams read files.

    Raises:
        SettingsError: no such file, unreadable, empty, damaged, or too short for one sequence of each split.
    """
    if data.corpus is Corpus.tokens:
        splits = _of_tokens(data)
    elif data.streaming:
        splits = _of_streams(data, seed)
    else:
        splits = _of_documents(data)
    stores = {"validation": splits.validation}
    if not isinstance(splits.train, RowStreams):
        stores["train"] = splits.train
    for name, store in sorted(stores.items()):
        if not store.num_sequences:
            tokens, unit = store.num_tokens, f"less than one sequence of {data.sequence_length} + 1"
            raise SettingsError(
                f"data.sequence_length={data.sequence_length}: the {name} split ({splits.source}) has {tokens} tokens, "
                f"{unit}; use more text or shorter sequences"
            )
    return splits


def _of_tokens(data: DataSettings) -> Splits:
    train = _open_tokens("data.train", data.train)
    held_out = _open_tokens("data.validation", data.validation) if data.validation else None
    largest_id = max(train.largest_id, held_out.largest_id if held_out else 0)
    known = train.manifest
    size = data.vocab_size or (known.vocab_size if known else largest_id + 1)
    if largest_id >= size:
        told = f"{data.train[0]} holds id {largest_id}; set at least {largest_id + 1}"
        raise SettingsError(f"data.vocab_size={size}: {told}")
    tokenizer = None
    if known and known.tokenizer and train.folder:
        tokenizer = load_tokenizer("data.train", str(train.folder / known.tokenizer))
    parts, rest = (train.parts, held_out.parts) if held_out else split_tail(train.parts, data.validation_fraction)
    digest = hashlib.sha256(f"{train.digest}{held_out.digest if held_out else data.validation_fraction}".encode())
    return Splits(
        train=TokenStore(parts, data.sequence_length),
        validation=TokenStore(rest, data.sequence_length),
        vocabulary=Vocabulary(size, 0, tokenizer),
        source=f"{len(train.parts)} token file(s)",
        digest=digest.hexdigest(),
    )


def _open_tokens(setting: str, names: Sequence[str]) -> TokenFiles:
    if len(names) == 1 and Path(names[0]).is_dir():
        return open_folder(setting, Path(names[0]))
    return open_plain(setting, expand(setting, names))


def _of_streams(data: DataSettings, seed: int) -> Splits:
    """A corpus that is read while training; its validation documents are read now."""
    train, held_out = row_files_of(data)
    encoder = load_encoder(data)
    numbered = [str(number) for number in range(data.num_labels or 0)]
    labels = Labels(tuple(train.label_names or numbered)) if data.is_labelled else None
    documents = _read(held_out)
    validation = _store(data, documents, encoder, labels)
    if train.is_empty():
        raise SettingsError(f"data.train={','.join(data.train)}: holds no document; name files that are not empty")
    told = {"files": [[Path(file).name, _size(file)] for file in train.files], "encoder": encoder.digest}
    digest = hashlib.sha256(f"{json.dumps(told)}{_digest(validation)}".encode()).hexdigest()
    return Splits(
        train=RowStreams(train, encoder, labels, data.sequence_length, data.packing, seed),
        validation=validation,
        vocabulary=encoder.vocabulary,
        source=f"{len(train.files)} {train.format} file(s), streamed",
        digest=digest,
        labels=labels,
        notes=tuple(held_out.take_notes()),
    )


def _of_documents(data: DataSettings) -> Splits:
    """A corpus that is read as a whole."""
    encoder, names, notes = load_encoder(data), None, []
    if data.corpus is Corpus.python_packages:
        train, validation, names = package_snippets(data.validation_fraction)
        source = f"{len(train) + len(validation)} pieces of {len(names)} packages of Python's standard library"
    elif data.corpus in OF_ROWS:
        files = row_files_of(data)
        train, validation = (_read(part) for part in files)
        names, notes = files[0].label_names, [note for part in files for note in part.take_notes()]
        source = f"{len(train)} rows of {len(files[0].files)} {files[0].format} file(s)"
    else:
        train, validation, source = _text_files(data)
    for setting, named, documents in (("train", data.train, train), ("validation", data.validation, validation)):
        if named and not documents:
            raise SettingsError(f"data.{setting}={','.join(named)}: holds no document; name files that are not empty")
    labels = find_labels(train, names, data) if data.is_labelled else None
    if not validation and len(train) == 1 and data.packing is Packing.packed and not labels:
        (tokens,) = encoder.encode([train[0].text])
        parts, rest = split_tail([tokens], data.validation_fraction)
        stores: list[Store] = [TokenStore(parts, data.sequence_length), TokenStore(rest, data.sequence_length)]
    else:
        if not validation:
            train, validation = _held_out(train, data)
        stores = [_store(data, part, encoder, labels) for part in (train, validation)]
    digest = hashlib.sha256("".join(map(_digest, stores)).encode()).hexdigest()
    return Splits(stores[0], stores[1], encoder.vocabulary, source, digest, labels, tuple(notes))


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


def _text_files(data: DataSettings) -> tuple[list[Document], list[Document], str]:
    """Every file is a document."""
    if data.corpus is Corpus.python_stdlib:
        train = _contents("data.corpus", library_sources())
        source = f"{len(train)} modules of Python's standard library"
    else:
        train = _contents("data.train", expand("data.train", data.train))
        source = f"{len(train)} text file(s)"
    validation = _contents("data.validation", expand("data.validation", data.validation)) if data.validation else []
    return train, validation, source


def _contents(setting: str, paths: Sequence[Path]) -> list[Document]:
    """The contents of all files that are not empty."""
    documents = [Document(text) for text in (read_text(setting, path) for path in paths) if text]
    if not documents:
        raise SettingsError(f"{setting}={paths[0] if paths else ''}: holds no text; name files that are not empty")
    return documents


def read_text(setting: str, path: Path) -> bytes:
    """The contents of a text file.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting}={path}: cannot be read ({reason(error)}); name files that can") from error


def _held_out(documents: Sequence[Document], data: DataSettings) -> tuple[list[Document], list[Document]]:
    _, texts = by_content([document.text for document in documents], data.validation_fraction)
    chosen = set(texts)
    by_text = {document.text: document for document in documents}
    rule = f"all {len(documents)} documents have the text of one that is held out; name data.validation, or more text"
    is_rest = len(documents) < 2 or any(document.text not in chosen for document in documents)
    require(is_rest, "data.validation_fraction", data.validation_fraction, rule)
    return [document for document in documents if document.text not in chosen], [by_text[text] for text in texts]


def _store(data: DataSettings, documents: Sequence[Document], encoder: Encoder, labels: Labels | None) -> Store:
    """Documents as sequences."""
    texts = [document.text for document in documents]
    pad = encoder.vocabulary.pad
    if labels is not None:
        numbers = [labels.number(document, document.place) for document in documents]
        return DocumentStore(encoder.encode(texts, data.sequence_length), pad, np.array(numbers, dtype=np.int64))
    if data.packing is Packing.document:
        tokens = encoder.encode(texts, data.sequence_length + 1)
        return DocumentStore([ids for ids in tokens if len(ids) > 1], pad)
    return TokenStore([np.concatenate(encoder.encode(texts))] if texts else [], data.sequence_length)


def _size(file: str) -> int | None:
    return Path(file).stat().st_size if Path(file).is_file() else None


def _digest(store: Store) -> str:
    if isinstance(store, TokenStore):
        return digest_of(store.parts)
    assert isinstance(store, DocumentStore)
    labels = [] if store.labels is None else [store.labels.astype(np.uint64)]
    return digest_of([*store.documents, *labels])
