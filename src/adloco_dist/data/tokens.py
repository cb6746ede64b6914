"""Stores of sequences: token ids cut into equal ones, or one for every document.

Shape suffixes: B sequences, L tokens of a sequence that are predicted (a stored sequence has L + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from adloco_dist.data.batch import Batch
from adloco_dist.data.encoding import Tokens


class Store(Protocol):
    """Sequences by number."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        ...

    def batch(self, ids: npt.NDArray[np.int64]) -> Batch:
        """The sequences `ids`, on the CPU."""
        ...


@dataclass(frozen=True)
class TokenStore:
    """One-dimensional arrays of token ids (in memory or memory-mapped), each cut into sequences of equal length.

    Sequence s of an array covers tokens[s * L : s * L + L + 1]: neighbours share one token, so each token but the
    first is predicted exactly once.
    """

    parts: Sequence[Tokens]
    sequence_length: int

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        counts = [max(0, (len(part) - 1) // self.sequence_length) for part in self.parts]
        return np.cumsum(counts, dtype=np.int64)

    @property
    def num_sequences(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))

    def batch(self, ids: npt.NDArray[np.int64]) -> Batch:
        width = self.sequence_length + 1
        rows = np.empty((len(ids), width), dtype=np.int64)
        places = np.searchsorted(self._ends, ids, side="right")
        for place in np.unique(places):
            chosen = places == place
            first = self._ends[place - 1] if place else 0
            starts = (ids[chosen] - first) * self.sequence_length
            rows[chosen] = self.parts[place][starts[:, None] + np.arange(width)]
        return Batch.packed(torch.from_numpy(rows))


@dataclass(frozen=True)
class DocumentStore:
    """Documents of any length, one for each sequence, which padding fills up to the longest of a batch."""

    documents: Sequence[Tokens]
    pad: int
    labels: npt.NDArray[np.int64] | None = None
    """(num_sequences,) what is predicted of each; None: its tokens."""

    @property
    def num_sequences(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    def batch(self, ids: npt.NDArray[np.int64]) -> Batch:
        return padded([self.documents[id] for id in ids], self.pad, None if self.labels is None else self.labels[ids])


def padded(documents: Sequence[Tokens], pad: int, labels: npt.NDArray[np.int64] | None = None) -> Batch:
    """A batch of documents of different lengths.

    Args:
        labels: (B,), of a labelled corpus.
    """
    lengths = np.array([len(document) for document in documents])
    rows = np.full((len(documents), lengths.max()), pad, dtype=np.int64)
    for row, document in zip(rows, documents, strict=True):
        row[: len(document)] = document
    num_targets = tuple(int(length) - 1 for length in lengths) if labels is None else (1,) * len(documents)
    return Batch(
        torch.from_numpy(rows), num_targets, torch.from_numpy(lengths),
        None if labels is None else torch.from_numpy(labels),
    )  # fmt: skip
