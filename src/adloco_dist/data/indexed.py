"""Data sets whose sequences are read by number: which of them a trainer reads, and in which order.

docs/guarantees.md, "What every run keeps", says what of it never changes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from adloco_dist.config import Shards, require
from adloco_dist.data.protocols import Batch, SequenceIds, SequenceTable


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of range(count), the same on every machine and numpy version for the same key. The raw streams of
    numpy's bit generators are stable by contract; `Generator.permutation` is not."""
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(draws, kind="stable")


def deal(num_sequences: int, num_trainers: int, seed: int, policy: Shards = Shards.disjoint) -> list["Shard"]:
    """Every trainer's shard of range(num_sequences). disjoint: random parts, equal to within one sequence. shared: all
    of it for each trainer."""
    if policy is Shards.shared:
        everything = np.arange(num_sequences)
        return [Shard(everything, seed, trainer) for trainer in range(num_trainers)]
    order = permutation(num_sequences, seed)
    return [Shard(order[trainer::num_trainers], seed, trainer) for trainer in range(num_trainers)]


class Shard:
    """The sequence ids of one trainer, read in a fresh random order every epoch.

    `position` counts the sequences taken so far; all ranks advance it by the same number. A batch may straddle two
    epochs, and each sequence is used exactly once per epoch.

    A shard that was united from others begins with a prefix: the ids that each of them had left unread.
    """

    def __init__(
        self, sequence_ids: SequenceIds, seed: int, trainer: int, members: Sequence["Shard"] = (), first_epoch: int = 0
    ) -> None:
        """With members, which the shard is united from, `sequence_ids` is empty; the number of an epoch decides its
        order."""
        self.position = 0
        self.trainer, self._seed = trainer, seed
        self._sequence_ids, self._members, self._first_epoch = sequence_ids, tuple(members), first_epoch
        self._size = sum(map(len, members)) if members else len(sequence_ids)
        self._prefix: SequenceIds = sequence_ids[:0]
        self._prefix_size = sum(member.num_unread for member in members)
        self._lineage = [member.state_dict() for member in members]
        self._orders: dict[int, SequenceIds] = {}
        self._lock = threading.Lock()  # workers of one rank may read at once

    def __len__(self) -> int:
        """Sequences of a whole epoch."""
        return self._size

    @property
    def num_unread(self) -> int:
        """The number of sequences of the present epoch that were not taken yet; 0 between two epochs."""
        ahead = self._prefix_size - self.position
        return ahead if ahead >= 0 else ahead % len(self)

    def unread(self) -> SequenceIds:
        """The ids of the sequences that were not taken yet, in the order in which they would have been."""
        return self.peek(0, self.num_unread)

    def unite(self, members: Sequence["Shard"]) -> "Shard":
        """This trainer's shard after a merge of all `members`, itself among them, which are not read any more.

        It begins with what each of them has left unread, in the order given; then come epochs of the union, in orders
        that no epoch of the trainer had. Ids are put together when they are read: a rank without a worker of the
        trainer never needs them.
        """
        epochs_begun = max(0, self.position + self.num_unread - self._prefix_size) // len(self)
        return Shard(self._sequence_ids[:0], self._seed, self.trainer, members, self._first_epoch + epochs_begun)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of the shards that this one was united from, in plain JSON values."""
        return {"trainer": self.trainer, "position": self.position, "members": list(self._lineage)}

    @staticmethod
    def restore(state: Mapping[str, Any], dealt: Mapping[int, "Shard"]) -> "Shard":
        """The shard whose `state_dict` is `state`, where the run began with those that were dealt; raises a ValueError
        where a position is not a number of sequences."""
        if type(state["position"]) is not int or state["position"] < 0:
            raise ValueError(f"position is {state['position']!r}, not a number of sequences")
        origin = dealt[state["trainer"]]
        shard = Shard(origin._sequence_ids, origin._seed, origin.trainer)
        if state["members"]:
            members = [Shard.restore(member, dealt) for member in state["members"]]
            (survivor,) = [member for member in members if member.trainer == shard.trainer]
            shard = survivor.unite(members)
        shard.position = state["position"]
        return shard

    def advance(self, count: int) -> None:
        """Take `count` sequences."""
        self.position += count

    def peek(self, offset: int, count: int) -> SequenceIds:
        """The ids of `count` sequences that begin `offset` after the position, which does not move."""
        with self._lock:
            self._put_together()
            return self._read(self.position + offset, count)

    def _read(self, start: int, count: int) -> SequenceIds:
        positions = start + np.arange(count)
        ids = np.empty(count, dtype=np.int64)
        in_prefix = positions < self._prefix_size
        ids[in_prefix] = self._prefix[positions[in_prefix]]
        epochs, offsets = np.divmod(positions - self._prefix_size, len(self))
        for epoch in np.unique(epochs[~in_prefix]):
            here = ~in_prefix & (epochs == epoch)
            ids[here] = self._order(int(epoch))[offsets[here]]
        return ids

    def _put_together(self) -> None:
        if self._members:
            self._prefix = np.concatenate([member.unread() for member in self._members])
            self._sequence_ids = np.concatenate([member._sequence_ids for member in self._members])
            self._members = ()

    def _order(self, epoch: int) -> SequenceIds:
        if epoch not in self._orders:
            current = (self.position - self._prefix_size) // len(self)
            # All workers of a rank read the same round, so its epochs are kept and older ones are dropped.
            self._orders = {known: order for known, order in self._orders.items() if known >= current}
            order = permutation(len(self), self._seed, 1 + self.trainer, self._first_epoch + epoch)
            self._orders[epoch] = self._sequence_ids[order]
        return self._orders[epoch]


@dataclass(frozen=True)
class ShardCursor:
    """A trainer's shard of a table's sequences."""

    table: SequenceTable
    shard: Shard

    @property
    def size(self) -> int:
        return len(self.shard)

    @property
    def position(self) -> int:
        return self.shard.position

    def batch(
        self, worker: int, num_workers: int, update: int, local_batch: int, updates: Sequence[int] | None = None
    ) -> Batch:
        """Worker m takes the m-th run of `local_batch` sequences of an update, counting those that still take one."""
        run = update * num_workers + worker
        if updates is not None:
            run = sum(min(count, update) for count in updates) + sum(count > update for count in updates[:worker])
        return self.table.batch(self.shard.peek(run * local_batch, local_batch))

    def ends(self, workers: Sequence[int], num_workers: int, sequences: int) -> dict[int, Any]:
        return {}

    def advance(self, updates: int, num_workers: int, local_batch: int, ends: Mapping[int, Any]) -> None:
        self.shard.advance(updates * num_workers * local_batch)

    def unite(self, others: Sequence[Self]) -> "ShardCursor":
        members = sorted([self.shard, *(other.shard for other in others)], key=lambda shard: shard.trainer)
        return ShardCursor(self.table, self.shard.unite(members))

    def state_dict(self) -> dict[str, Any]:
        return self.shard.state_dict()


@dataclass(frozen=True)
class IndexedDataset:
    """A table of sequences to train on."""

    table: SequenceTable
    digest: str = ""

    @property
    def num_sequences(self) -> int:
        return self.table.num_sequences

    def check_size(self, num_trainers: int, workers_per_trainer: int, shards: Shards) -> None:
        """Check that every shard holds a sequence for each worker; larger batches are capped at the shard."""
        num_shards = 1 if shards is Shards.shared else num_trainers
        smallest = self.num_sequences // num_shards
        has = f"a trainer's shard has {smallest} sequences ({self.num_sequences} in {num_shards} shards)"
        rule = f"{has}, less than one for each worker; use more text, shorter sequences, fewer trainers or workers"
        require(smallest >= workers_per_trainer, "pool.workers_per_trainer", workers_per_trainer, rule)

    def deal(self, num_trainers: int, workers_per_trainer: int, shards: Shards, seed: int) -> list[ShardCursor]:
        return [ShardCursor(self.table, shard) for shard in deal(self.num_sequences, num_trainers, seed, shards)]

    def restore(
        self, states: Mapping[int, Mapping[str, Any]], num_trainers: int, shards: Shards, seed: int
    ) -> dict[int, ShardCursor]:
        dealt = dict(enumerate(deal(self.num_sequences, num_trainers, seed, shards)))
        return {trainer: ShardCursor(self.table, Shard.restore(state, dealt)) for trainer, state in states.items()}

    def take_notes(self) -> list[str]:
        return []
