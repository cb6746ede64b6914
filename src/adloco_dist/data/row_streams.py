"""Corpora of rows that are read while training, and tokenised ahead in the background.

A stream is a part of the corpus' files, or every n-th row of one file. A position in it is four integers, so that any
rank can continue where another stopped.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from itertools import islice

import numpy as np

from adloco_dist.config import Packing, SettingsError
from adloco_dist.data.documents import Document, RowFiles, class_of
from adloco_dist.data.encoding import Encoder, Tokens
from adloco_dist.data.indexed import permutation
from adloco_dist.data.streams import Stream, StreamError
from adloco_dist.data.tokens import TokenBatch, padded

DOCUMENTS_PER_CALL = 32
"""The number of documents that the tokenizer is given in one call."""
BLOCK_SEQUENCES, BLOCKS_AHEAD = 32, 8
"""Sequences that are tokenised together, and the number of such blocks that are ready before they are asked for."""


@dataclass(frozen=True)
class RowPosition:
    """Where a sequence of a stream begins."""

    epoch: int = 0
    file: int = 0
    """Index of the file in the order of the epoch."""
    row: int = 0
    """Number of the row in the file."""
    token: int = 0
    """Index of the token in that row's document."""

    @classmethod
    def of(cls, stream: Stream) -> "RowPosition":
        """Where the stream's next sequence begins."""
        return cls(*stream.position or ())


@dataclass(frozen=True)
class Item:
    """A sequence of a stream."""

    tokens: Tokens
    label: int | None
    next: RowPosition
    """Where the one after it begins."""


@dataclass(frozen=True)
class RowStreams:
    """A corpus of rows, read in streams."""

    rows: RowFiles
    encoder: Encoder
    labels: tuple[str, ...] | None
    """Names of the classes; None: the corpus has none."""
    seed: int = 0
    """Seed of the order of the files, which differs between epochs."""

    def check_parts(self, parts: int) -> None:
        for part in range(parts):
            files, index, stride = files_of_part(self.rows.files, part, parts)
            if stride > 1 and not any(row.row % stride == index for row in self.rows.of_file(files[0])):
                count = sum(1 for _ in self.rows.of_file(files[0]))
                has = f"{files[0]} has {count} documents, one for each of {stride} streams is needed"
                raise SettingsError(f"{self.rows.setting}: {has}; use fewer trainers or workers, or more files")

    def open(self, stream: Stream) -> "RowReader":
        return RowReader(self, stream)

    def collate(self, items: Sequence[Item]) -> TokenBatch:
        labels = None if self.labels is None else np.array([item.label for item in items])
        batch = padded([item.tokens for item in items], self.encoder.vocabulary.pad, labels)
        return TokenBatch.packed(batch.tokens) if self._is_packed else batch

    @property
    def _is_packed(self) -> bool:
        return self.rows.data.packing is Packing.packed and self.labels is None

    def take_notes(self) -> list[str]:
        return [*self.rows.take_notes(), *self.encoder.take_notes()]

    def items(self, stream: Stream) -> Iterator[Item]:
        """The sequences of a stream from its position on, without end."""
        documents = self._documents(stream)
        if self._is_packed:
            return self._packed(documents, RowPosition.of(stream).token)
        return self._one_each(documents)

    def _documents(self, stream: Stream) -> Iterator[tuple[RowPosition, Document]]:
        """The documents of one epoch after the other, each with its position."""
        files, index, stride = files_of_part(self.rows.files, stream.part, stream.parts)
        start = RowPosition.of(stream)
        while True:
            order = permutation(len(files), self.seed, stream.id, start.epoch)
            is_empty = True
            for number in range(start.file, len(files)):
                first = start.row if number == start.file else 0
                for document in self.rows.of_file(files[int(order[number])], first):
                    if document.row % stride == index:
                        is_empty = False
                        yield RowPosition(start.epoch, number, document.row), document
            if is_empty and start == RowPosition(start.epoch):
                part = f"part {stream.part + 1} of {stream.parts}"
                raise StreamError(f"{self.rows.setting}={','.join(files)}: {part} has no document")
            start = RowPosition(start.epoch + 1)

    def _encoded(
        self, documents: Iterator[tuple[RowPosition, Document]], maximum: int | None
    ) -> Iterator[tuple[RowPosition, Document, Tokens]]:
        while True:
            group = list(islice(documents, DOCUMENTS_PER_CALL))
            tokens = self.encoder.encode([document.text for _, document in group], maximum)
            for (position, document), ids in zip(group, tokens, strict=True):
                yield position, document, ids

    def _packed(self, documents: Iterator[tuple[RowPosition, Document]], token: int) -> Iterator[Item]:
        """Sequences of equal length, from `token` of the first document on; neighbours share one token, so that each
        token is predicted once."""
        length, ahead = self.rows.data.sequence_length, 0
        pending: deque[tuple[RowPosition, Tokens]] = deque()
        for position, _, ids in self._encoded(documents, None):
            pending.append((position, ids))
            ahead += len(ids)
            while ahead - token > length:
                first = pending[0][1]  # a long document is not copied for each of its sequences
                joined = first if len(first) - token > length else np.concatenate([part for _, part in pending])
                tokens = joined[token : token + length + 1]
                token += length
                while token >= len(pending[0][1]):
                    token -= len(pending[0][1])
                    ahead -= len(pending.popleft()[1])
                yield Item(tokens, None, replace(pending[0][0], token=token))

    def _one_each(self, documents: Iterator[tuple[RowPosition, Document]]) -> Iterator[Item]:
        minimum = 1 if self.labels is not None else 2
        width = self.rows.data.sequence_length + minimum - 1
        for position, document, ids in self._encoded(documents, width):
            if len(ids) >= minimum:
                label = None if self.labels is None else class_of(document, self.labels)
                yield Item(ids, label, replace(position, row=position.row + 1))


def files_of_part(files: tuple[str, ...], part: int, parts: int) -> tuple[tuple[str, ...], int, int]:
    """The files that one of `parts` reads, every `stride`-th row from `index` on: (files, index, stride)."""
    if len(files) >= parts:
        return files[part::parts], 0, 1
    file = part % len(files)
    return (files[file],), part // len(files), len(range(file, parts, len(files)))


class RowReader:
    """Reads one stream; a background thread tokenises the next sequences."""

    def __init__(self, corpus: RowStreams, stream: Stream) -> None:
        self._position = RowPosition.of(stream)
        self._items = corpus.items(stream)
        self._background = ThreadPoolExecutor(1, "tokenize")
        self._ahead: deque[Future[list[Item]]] = deque(self._submit() for _ in range(BLOCKS_AHEAD))
        self._block: deque[Item] = deque()

    def take(self) -> Item:
        try:
            while not self._block:
                self._block.extend(self._ahead.popleft().result())
                self._ahead.append(self._submit())
        except SettingsError as error:  # of this rank alone, in the middle of training
            raise StreamError(str(error)) from error
        item = self._block.popleft()
        self._position = item.next
        return item

    def position(self) -> list[int]:
        return list(astuple(self._position))

    def close(self) -> None:
        self._background.shutdown(cancel_futures=True)

    def _submit(self) -> Future[list[Item]]:
        return self._background.submit(lambda: list(islice(self._items, BLOCK_SEQUENCES)))
