"""Corpora that are read while training, tokenised ahead in the background.

A stream is a part of the corpus' files, or every n-th row of one file; streams do not overlap, and every worker begins
with one of its own. Where a stream stands is a few integers, so that any rank can go on where another stopped.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock

import numpy as np

from adloco_dist.config import Packing, SettingsError
from adloco_dist.data.batch import Batch
from adloco_dist.data.documents import Document, RowFiles
from adloco_dist.data.encoding import Encoder, Tokens
from adloco_dist.data.labels import Labels
from adloco_dist.data.order import permutation
from adloco_dist.data.tokens import padded

DOCUMENTS_AT_ONCE = 32
"""Which the tokenizer is given."""
BLOCK_SEQUENCES, BLOCKS_AHEAD = 32, 8
"""Made ready together, and so many times before they are asked for."""


class StreamError(RuntimeError):
    """A stream cannot go on."""


@dataclass(frozen=True)
class Place:
    """Where a sequence of a stream begins."""

    epoch: int = 0
    file: int = 0
    """In the order of the epoch."""
    row: int = 0
    """Of the file."""
    token: int = 0
    """Of that row's document."""


@dataclass(frozen=True)
class Stream:
    """A part of the corpus, and how far it was read."""

    id: int
    part: int
    """Of `parts`, in which the corpus is dealt."""
    parts: int
    ordinal: int = 0
    """Sequences that were taken from it."""
    place: Place = Place()
    """Where the next one begins."""


@dataclass(frozen=True)
class Item:
    """A sequence of a stream."""

    tokens: Tokens
    label: int | None
    next: Place
    """Where the one after it begins."""


@dataclass(frozen=True)
class Claim:
    """What a worker reads: a sequence of a stream, which `sharers` workers read in turn."""

    stream: Stream
    ordinal: int
    sharer: int = 0
    """Which of them."""


@dataclass(frozen=True)
class RowStreams:
    """A corpus of rows, read in streams. Sequences come by `Claim`, each stream's in ascending order."""

    rows: RowFiles
    encoder: Encoder
    labels: Labels | None
    sequence_length: int
    packing: Packing
    seed: int = 0
    """Of the order of the files, another one in every epoch."""
    _readers: dict[tuple[int, int], "_Reader"] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def check_parts(self, parts: int) -> None:
        """Refuse more parts than there are documents for.

        Raises:
            SettingsError: a part would have none.
        """
        for part in range(parts):
            files, index, stride = share(self.rows.files, part, parts)
            if stride > 1 and not any(row.row % stride == index for row in self.rows.of_file(files[0])):
                count = sum(1 for _ in self.rows.of_file(files[0]))
                told = f"{files[0]} has {count} documents, one for each of {stride} streams is needed"
                rule = "use fewer trainers or workers, or more files"
                raise SettingsError(f"{self.rows.setting}: {told}; {rule}")

    def batch(self, claims: Sequence[Claim]) -> Batch:
        """The sequences that a worker claims, on the CPU; waits for those that are not tokenised yet.

        Raises:
            StreamError: a file cannot be read to its end, a row holds no text, or there is none.
        """
        try:
            items = [self._reader(claim).take(claim.ordinal) for claim in claims]
        except SettingsError as error:  # of this rank alone, in the middle of training
            raise StreamError(str(error)) from error
        tokens = [item.tokens for item in items]
        if self.labels is not None:
            return padded(tokens, self.encoder.vocabulary.pad, np.array([item.label for item in items]))
        batch = padded(tokens, self.encoder.vocabulary.pad)
        return Batch.packed(batch.tokens) if self.packing is Packing.packed else batch

    def place(self, claim: Claim) -> Place:
        """Where a sequence begins that this rank is about to read."""
        return self._reader(claim).place_of(claim.ordinal)

    def take_notes(self) -> list[str]:
        """What was left out since the last call, one line for each file and cause."""
        with self._lock:
            return self.rows.take_notes()

    def items(self, stream: Stream) -> Iterator[Item]:
        """The sequences of a stream from where it stands, without end."""
        documents = self._documents(stream)
        if self.packing is Packing.packed and self.labels is None:
            return self._packed(documents, stream.place.token)
        return self._one_each(documents)

    def _reader(self, claim: Claim) -> "_Reader":
        """From `claim` on; what lies before it was read already, or is passed over."""
        key = (claim.stream.id, claim.sharer)
        with self._lock:
            reader = self._readers.get(key)
            if reader is None or claim.ordinal < reader.ordinal:  # again from the beginning of the round
                if reader:
                    reader.close()
                reader = self._readers[key] = _Reader(self, claim.stream)
        return reader

    def _documents(self, stream: Stream) -> Iterator[tuple[Place, Document]]:
        """Of one epoch after the other, each with its place."""
        files, index, stride = share(self.rows.files, stream.part, stream.parts)
        start = stream.place
        while True:
            order = permutation(len(files), self.seed, stream.id, start.epoch)
            found = False
            for number in range(start.file, len(files)):
                first = start.row if number == start.file else 0
                for document in self.rows.of_file(files[int(order[number])], first):
                    if document.row % stride == index:
                        found = True
                        yield Place(start.epoch, number, document.row), document
            if not found and start == Place(start.epoch):
                told = f"part {stream.part + 1} of {stream.parts} has no document"
                raise StreamError(f"{self.rows.setting}={','.join(files)}: {told}")
            start = Place(start.epoch + 1)

    def _encoded(
        self, documents: Iterator[tuple[Place, Document]], most: int | None
    ) -> Iterator[tuple[Place, Document, Tokens]]:
        while True:
            group = list(islice(documents, DOCUMENTS_AT_ONCE))
            tokens = self.encoder.encode([document.text for _, document in group], most)
            for (place, document), ids in zip(group, tokens, strict=True):
                yield place, document, ids

    def _packed(self, documents: Iterator[tuple[Place, Document]], token: int) -> Iterator[Item]:
        """Sequences of equal length; neighbours share one token, so each token is predicted once.

        Args:
            token: of the first document, at which the first sequence begins.
        """
        length, ahead = self.sequence_length, 0
        pending: deque[tuple[Place, Tokens]] = deque()
        for place, _, ids in self._encoded(documents, None):
            pending.append((place, ids))
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

    def _one_each(self, documents: Iterator[tuple[Place, Document]]) -> Iterator[Item]:
        least = 1 if self.labels is not None else 2
        width = self.sequence_length + least - 1
        for place, document, ids in self._encoded(documents, width):
            if len(ids) >= least:
                label = self.labels.number(document, document.place) if self.labels else None
                yield Item(ids, label, replace(place, row=place.row + 1))


def share(files: tuple[str, ...], part: int, parts: int) -> tuple[tuple[str, ...], int, int]:
    """Which files one of `parts` reads, and of their rows each `stride`-th from `index` on: (files, index, stride)."""
    if len(files) >= parts:
        return files[part::parts], 0, 1
    file = part % len(files)
    return (files[file],), part // len(files), len(range(file, parts, len(files)))


class _Reader:
    """One stream on this rank: its next sequences, made ready by a thread of its own."""

    def __init__(self, corpus: RowStreams, stream: Stream) -> None:
        self.ordinal = stream.ordinal
        """Of the sequence that comes next."""
        self._place = stream.place
        self._items = corpus.items(stream)
        self._background = ThreadPoolExecutor(1, "tokenize")
        self._ahead: deque[Future[list[Item]]] = deque(self._submit() for _ in range(BLOCKS_AHEAD))
        self._block: deque[Item] = deque()

    def take(self, ordinal: int) -> Item:
        """The sequence of that number, which was not passed yet."""
        self._pass_to(ordinal)
        return self._next()

    def place_of(self, ordinal: int) -> Place:
        """Where it begins."""
        self._pass_to(ordinal)
        return self._place

    def close(self) -> None:
        self._background.shutdown(cancel_futures=True)

    def _pass_to(self, ordinal: int) -> None:
        while self.ordinal < ordinal:
            self._next()

    def _next(self) -> Item:
        while not self._block:
            self._block.extend(self._ahead.popleft().result())
            self._ahead.append(self._submit())
        item = self._block.popleft()
        self.ordinal, self._place = self.ordinal + 1, item.next
        return item

    def _submit(self) -> Future[list[Item]]:
        return self._background.submit(lambda: list(islice(self._items, BLOCK_SEQUENCES)))
