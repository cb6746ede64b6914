"""What a round asks of training data: a data set deals cursors to trainers, and a cursor gives batches to workers.

Corpora of text implement these protocols (indexed.py, streams.py), and so does a user's own data (own.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from adloco_dist.config import Shards

SequenceIds = npt.NDArray[np.int64]


class Batch(Protocol):
    """Sequences that are computed in one micro-batch, or split into several."""

    def __len__(self) -> int:
        """The number of sequences."""
        ...

    def split(self, micro_batch_size: int) -> Sequence[Self]:
        """Micro-batches of `micro_batch_size` sequences each; the last may be smaller."""
        ...

    def chunks(self, count: int) -> Sequence[Self]:
        """`count` batches whose sizes differ by at most one sequence, larger ones first."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same sequences on `device`; a GPU receives them without waiting."""
        ...


class SequenceTable(Protocol):
    """Sequences that can be read by number, in any order."""

    @property
    def num_sequences(self) -> int: ...

    def batch(self, ids: SequenceIds) -> Batch:
        """The sequences `ids`, on the CPU."""
        ...


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

    def batch(
        self, worker: int, num_workers: int, update: int, local_batch: int, updates: Sequence[int] | None = None
    ) -> Batch:  # fmt: skip
        """What `worker` takes in an update of the present round, on the CPU; the cursor does not move.

        Args:
            updates: updates of each worker in the round, where they differ; never so where `size` is None.
        """
        ...

    def ends(self, workers: Sequence[int], num_workers: int, sequences: int) -> dict[int, Any]:
        """What other ranks must know of what was read here, in plain JSON values, by stream.

        Ranks exchange it at the end of a round. It is empty for indexed data.

        Args:
            workers: those of the trainer that this rank runs.
            sequences: number that every worker takes in the round.
        """
        ...

    def advance(self, updates: int, num_workers: int, local_batch: int, ends: Mapping[int, Any]) -> None:
        """End a round.

        Args:
            updates: of each worker; where these differ, of all of them together, and then `num_workers` is 1.
            ends: what `ends` returned on all ranks.
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
        """Check that there is a sequence for each worker.

        Raises:
            SettingsError: there is not.
        """
        ...

    def deal(self, num_trainers: int, workers_per_trainer: int, shards: Shards, seed: int) -> Sequence[Cursor]:
        """Every trainer's cursor, as a run begins."""
        ...

    def restore(
        self, states: Mapping[int, Mapping[str, Any]], num_trainers: int, shards: Shards, seed: int
    ) -> Mapping[int, Cursor]:
        """The trainers' cursors from their `state_dict`.

        Args:
            num_trainers: number of trainers with which the run began.

        Raises:
            Exception: of several kinds, where a state does not belong to this data set.
        """
        ...

    def take_notes(self) -> list[str]:
        """What was left out of damaged files since the last call, one line for each file and cause."""
        ...
