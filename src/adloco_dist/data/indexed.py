"""Data sets whose sequences are read by number: which of them a trainer reads, and in which order.

docs/guarantees.md, "What every run keeps", says what never changes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from adloco_dist.config import Shards, require
from adloco_dist.data.protocols import Batch, SequenceIds, SequenceTable, States, turns_before


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of range(count), the same on every machine and numpy version for the same key. The raw streams of
    numpy's bit generators are stable by contract; `Generator.permutation` is not."""
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(draws, kind="stable")


class ShardCursor:
    """A trainer's shard of a table: sequence ids, read in a fresh random order every epoch.

    `position` counts the sequences taken so far; all ranks advance it by the same number. A batch may straddle two
    epochs, and each sequence is used exactly once per epoch. A shard that was united from others begins with a prefix:
    the ids that each of them had left unread.
    """

    def __init__(
        self,
        table: SequenceTable,
        sequence_ids: SequenceIds,
        seed: int,
        trainer: int,
        members: Sequence["ShardCursor"] = (),
        first_epoch: int = 0,
    ) -> None:
        """With members, from which the shard is united, `sequence_ids` is empty."""
        self.position = 0
        self.size = len(sequence_ids) + sum(member.size for member in members)
        self.table, self.trainer, self._seed = table, trainer, seed
        self._sequence_ids, self._members, self._first_epoch = sequence_ids, tuple(members), first_epoch
        self._prefix: SequenceIds = sequence_ids[:0]
        self._prefix_size = sum(member.num_unread for member in members)
        self._lineage = [member.state_dict() for member in members]
        self._orders: dict[int, SequenceIds] = {}
        self._lock = threading.Lock()  # workers of one rank may read at the same time

    @property
    def num_unread(self) -> int:
        """Sequences of the present epoch that were not taken yet; 0 between two epochs."""
        ahead = self._prefix_size - self.position
        return ahead if ahead >= 0 else ahead % self.size

    def unread(self) -> SequenceIds:
        """The ids of those sequences, in their order."""
        return self.peek(0, self.num_unread)

    def unite(self, others: Sequence["ShardCursor"]) -> "ShardCursor":
        """It begins with what each member has left unread, by ascending trainer; then come epochs of the union, in
        orders that no epoch of the trainer had. Ids are joined when they are read: a rank without a worker of the
        trainer never needs them."""
        members = sorted([self, *others], key=lambda member: member.trainer)
        epochs_begun = max(0, self.position + self.num_unread - self._prefix_size) // self.size
        no_ids, first_epoch = self._sequence_ids[:0], self._first_epoch + epochs_begun
        return ShardCursor(self.table, no_ids, self._seed, self.trainer, members, first_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of the shards from which this one was united, in plain JSON values."""
        return {"trainer": self.trainer, "position": self.position, "members": list(self._lineage)}

    @staticmethod
    def restore(state: Mapping[str, Any], dealt: Mapping[int, "ShardCursor"]) -> "ShardCursor":
        """The shard whose `state_dict` is `state`, of a run that began with the shards `dealt`; raises a ValueError
        where a position is not a number of sequences."""
        if type(state["position"]) is not int or state["position"] < 0:
            raise ValueError(f"position is {state['position']!r}, not a number of sequences")
        origin = dealt[state["trainer"]]
        shard = ShardCursor(origin.table, origin._sequence_ids, origin._seed, origin.trainer)
        if state["members"]:
            members = [ShardCursor.restore(member, dealt) for member in state["members"]]
            (survivor,) = [member for member in members if member.trainer == shard.trainer]
            shard = survivor.unite([member for member in members if member is not survivor])
        shard.position = state["position"]
        return shard

    def batch(self, worker: int, update: int, local_batch: int, updates: Sequence[int]) -> Batch:
        """Worker m takes the m-th run of `local_batch` sequences of an update, counting those that still take one."""
        return self.table.batch(self.peek(turns_before(updates, worker, update) * local_batch, local_batch))

    def ends(self, workers: Sequence[int], local_batch: int, updates: Sequence[int]) -> dict[int, Any]:
        return {}

    def needs_all(self, num_workers: int) -> bool:
        return False

    def positions(self) -> dict[int, Any]:
        return {}

    def learn(self, positions: Mapping[int, Any]) -> None:
        pass

    def advance(self, local_batch: int, updates: Sequence[int], ends: Mapping[int, Any]) -> None:
        self.position += sum(updates) * local_batch

    def peek(self, offset: int, count: int) -> SequenceIds:
        """The ids of `count` sequences that begin `offset` after the position, which does not move."""
        with self._lock:
            self._join_members()
            return self._read(self.position + offset + np.arange(count))

    def _read(self, positions: SequenceIds) -> SequenceIds:
        ids = np.empty(len(positions), dtype=np.int64)
        in_prefix = positions < self._prefix_size
        ids[in_prefix] = self._prefix[positions[in_prefix]]
        epochs, offsets = np.divmod(positions - self._prefix_size, self.size)
        for epoch in np.unique(epochs[~in_prefix]):
            here = ~in_prefix & (epochs == epoch)
            ids[here] = self._order(int(epoch))[offsets[here]]
        return ids

    def _join_members(self) -> None:
        if self._members:
            self._prefix = np.concatenate([member.unread() for member in self._members])
            self._sequence_ids = np.concatenate([member._sequence_ids for member in self._members])
            self._members = ()

    def _order(self, epoch: int) -> SequenceIds:
        if epoch not in self._orders:
            current = (self.position - self._prefix_size) // self.size
            # All workers of a rank read the same round, so its epochs are kept and older ones are dropped.
            self._orders = {known: order for known, order in self._orders.items() if known >= current}
            order = permutation(self.size, self._seed, 1 + self.trainer, self._first_epoch + epoch)
            self._orders[epoch] = self._sequence_ids[order]
        return self._orders[epoch]


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
        """Every trainer's shard. disjoint: random parts, equal to within one sequence. shared: everything for each."""
        if shards is Shards.shared:
            parts = [np.arange(self.num_sequences)] * num_trainers
        else:
            order = permutation(self.num_sequences, seed)
            parts = [order[trainer::num_trainers] for trainer in range(num_trainers)]
        return [ShardCursor(self.table, ids, seed, trainer) for trainer, ids in enumerate(parts)]

    def restore(self, states: States, num_trainers: int, shards: Shards, seed: int) -> dict[int, ShardCursor]:
        dealt = dict(enumerate(self.deal(num_trainers, 1, shards, seed)))
        return {trainer: ShardCursor.restore(state, dealt) for trainer, state in states.items()}

    def take_notes(self) -> list[str]:
        return []
