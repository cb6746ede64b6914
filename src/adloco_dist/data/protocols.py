"""What a round asks of training data: a data set deals cursors to trainers, and a cursor gives batches to workers.

Corpora of text implement these protocols (indexed.py, streams.py), and so does a user's own data (own.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from adloco_dist.config import Shards

SequenceIds = npt.NDArray[np.int64]
States = Mapping[int, Mapping[str, Any]]
"""The `state_dict` of cursors, by trainer."""


class Batch(Protocol):
    """Sequences that are computed in one micro-batch, or split into several."""

    def __len__(self) -> int: ...
    def part(self, start: int, end: int) -> Self: ...

    def to(self, device: torch.device) -> Self:
        """The same sequences on `device`; a GPU receives them without waiting."""
        ...

    def split(self, micro_batch_size: int) -> list[Self]:
        """Micro-batches of `micro_batch_size` sequences each; the last may be smaller."""
        starts = range(0, len(self), micro_batch_size)
        return [self.part(start, min(start + micro_batch_size, len(self))) for start in starts]

    def chunks(self, count: int) -> list[Self]:
        """`count` batches whose sizes differ by at most one sequence, larger ones first."""
        size, num_larger = divmod(len(self), count)
        starts = [number * size + min(number, num_larger) for number in range(count + 1)]
        return [self.part(start, end) for start, end in pairwise(starts)]


class SequenceTable(Protocol):
    """Sequences that can be read by number, in any order."""

    @property
    def num_sequences(self) -> int: ...

    def batch(self, ids: SequenceIds) -> Batch:
        """The sequences `ids`, on the CPU."""
        ...


def turns_before(counts: Sequence[int], member: int, number: int) -> int:
    """Turns that come before the `number`-th of a member, where members that have so many each take them in turn, and
    those that have had theirs are left out."""
    return sum(min(count, number) for count in counts) + sum(count > number for count in counts[:member])


class Cursor(Protocol):
    """One trainer's share of a data set, and the position in it.

    A cursor is equal on all ranks of the run, because every rank can take over any trainer. Ranks read different
    batches from it, and advance it together at the end of a round.
    """

    @property
    def size(self) -> int | None:
        """Sequences of an epoch; None: unknown, because it is a stream."""
        ...

    @property
    def position(self) -> int:
        """Sequences taken so far."""
        ...

    def batch(self, worker: int, update: int, local_batch: int, updates: Sequence[int]) -> Batch:
        """What `worker` takes in an update of the present round, on the CPU; the cursor does not move. `updates` are
        those of each of the trainer's workers in the round."""
        ...

    def ends(self, workers: Sequence[int], local_batch: int, updates: Sequence[int]) -> dict[int, Any]:
        """The positions of what this rank has read at the end of a round: plain JSON values by stream; none if indexed.

        Args:
            workers: those of the trainer that this rank runs.
        """
        ...

    def needs_all(self, num_workers: int) -> bool:
        """Whether a rank that reads must know in every round what others have read, for they share a stream."""
        ...

    def positions(self) -> dict[int, Any]:
        """The positions that this rank knows, by stream; none if indexed."""
        ...

    def learn(self, positions: Mapping[int, Any]) -> None:
        """Take the positions that all ranks know together: before anything is saved, or read by others."""
        ...

    def advance(self, local_batch: int, updates: Sequence[int], ends: Mapping[int, Any]) -> None:
        """End a round.

        Args:
            ends: what `ends` returned here, or on all ranks: where others have read is not known until `learn`.
        """
        ...

    def unite(self, others: Sequence[Self]) -> Self:
        """This trainer's cursor after a merge with the trainers of `others`, which are not read any more."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values from which `Dataset.restore` makes an equal cursor."""
        ...


class Dataset(Protocol):
    """Training sequences."""

    @property
    def digest(self) -> str:
        """Equal digests mean equal data."""
        ...

    @property
    def num_sequences(self) -> int | None:
        """Sequences of the data set; None: those of a stream are not counted."""
        ...

    def check_size(self, num_trainers: int, workers_per_trainer: int, shards: Shards) -> None:
        """Check that there is a sequence for each worker; raises a SettingsError where there is not."""
        ...

    def deal(self, num_trainers: int, workers_per_trainer: int, shards: Shards, seed: int) -> Sequence[Cursor]:
        """Every trainer's cursor, as a run begins."""
        ...

    def restore(self, states: States, num_trainers: int, shards: Shards, seed: int) -> Mapping[int, Cursor]:
        """The trainers' cursors; the run began with so many trainers. Raises exceptions of several kinds where a state
        does not belong to this data set."""
        ...

    def take_notes(self) -> list[str]:
        """What was left out of damaged files since the last call, one line for each file and cause."""
        ...


@dataclass(frozen=True)
class Splits:
    """Training and validation data."""

    train: Dataset
    validation: SequenceTable
    source: str
    """What the data was made of, for people."""
    notes: tuple[str, ...] = ()
    """Lines that tell a user how the data was read."""

    @property
    def digest(self) -> str:
        return self.train.digest

    def facts(self) -> dict[str, Any]:
        """What the run's record says of the data."""
        return {
            "source": self.source,
            "digest": self.digest,
            "train_sequences": self.train.num_sequences,
            "validation_sequences": self.validation.num_sequences,
        }
