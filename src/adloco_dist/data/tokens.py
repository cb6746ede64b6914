"""Sequences of token ids, cut from long arrays or one for each document: batches and tables.

Shape suffixes: B sequences, W tokens of the longest of them, L tokens of a sequence that are predicted (a stored
sequence has L + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from adloco_dist.data.encoding import Tokens
from adloco_dist.data.items import moved
from adloco_dist.data.protocols import Batch, SequenceIds
from adloco_dist.data.token_files import digest_of


@dataclass(frozen=True)
class TokenBatch(Batch):
    """Sequences of token ids."""

    tokens: torch.Tensor
    """(B, W) ids, padded at the right. In a causal model position t predicts t + 1; in a classifier all predict the
    label."""
    num_targets: tuple[int, ...]
    """The number of targets of each sequence: its predicted tokens, or one label."""
    lengths: torch.Tensor | None = None
    """(B,) tokens of each that are not padding; None: all W."""
    labels: torch.Tensor | None = None
    """(B,) class of each sequence; None: the model is causal."""

    @classmethod
    def packed(cls, tokens: torch.Tensor) -> "TokenBatch":
        """A batch of sequences without padding, (B, L + 1), that predict L tokens each."""
        return cls(tokens, (tokens.shape[1] - 1,) * len(tokens))

    def __len__(self) -> int:
        return len(self.num_targets)

    @property
    def total_targets(self) -> int:
        return sum(self.num_targets)

    def part(self, start: int, end: int) -> "TokenBatch":
        """Sequences `start` to `end`, without the columns that are padding in all of them."""
        lengths = None if self.lengths is None else self.lengths[start:end]
        labels = None if self.labels is None else self.labels[start:end]
        num_targets = self.num_targets[start:end]
        width = self.tokens.shape[1] if labels is not None or lengths is None else max(num_targets) + 1
        return TokenBatch(self.tokens[start:end, :width], num_targets, lengths, labels)

    def to(self, device: torch.device) -> "TokenBatch":
        lengths, labels = moved(self.lengths, device), moved(self.labels, device)
        return TokenBatch(moved(self.tokens, device), self.num_targets, lengths, labels)


@dataclass(frozen=True)
class TokenTable:
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

    @property
    def digest(self) -> str:
        return digest_of(self.parts)

    def batch(self, ids: SequenceIds) -> TokenBatch:
        width = self.sequence_length + 1
        rows = np.empty((len(ids), width), dtype=np.int64)
        numbers = np.searchsorted(self._ends, ids, side="right")
        for number in np.unique(numbers):
            chosen = numbers == number
            first = self._ends[number - 1] if number else 0
            starts = (ids[chosen] - first) * self.sequence_length
            rows[chosen] = self.parts[number][starts[:, None] + np.arange(width)]
        return TokenBatch.packed(torch.from_numpy(rows))


@dataclass(frozen=True)
class DocumentTable:
    """Documents of any length, one for each sequence, padded to the longest of a batch."""

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

    @property
    def digest(self) -> str:
        labels = [] if self.labels is None else [self.labels.astype(np.uint64)]
        return digest_of([*self.documents, *labels])

    def batch(self, ids: SequenceIds) -> TokenBatch:
        labels = None if self.labels is None else self.labels[ids]
        return padded([self.documents[number] for number in ids], self.pad, labels)


TextTable = TokenTable | DocumentTable


def padded(documents: Sequence[Tokens], pad: int, labels: npt.NDArray[np.int64] | None = None) -> TokenBatch:
    """A batch of documents of different lengths, with the labels (B,) of a labelled corpus."""
    rows = [torch.from_numpy(document.astype(np.int64)) for document in documents]
    tokens, lengths = pad_sequence(rows, batch_first=True, padding_value=pad), torch.tensor(list(map(len, rows)))
    if labels is None:
        return TokenBatch(tokens, tuple(len(row) - 1 for row in rows), lengths)
    return TokenBatch(tokens, (1,) * len(rows), lengths, torch.from_numpy(labels))
