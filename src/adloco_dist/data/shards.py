"""Which sequences a trainer reads, and in which order (docs/guarantees.md, "What every run keeps")."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adloco_dist.config import Shards
from adloco_dist.data.order import permutation
from adloco_dist.data.protocols import SequenceIds


def deal(num_sequences: int, num_trainers: int, seed: int, policy: Shards = Shards.disjoint) -> list["Shard"]:
    """Every trainer's shard of range(num_sequences).

    disjoint: random parts, equal to within one sequence. shared: all of it for each trainer.
    """
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

    def __init__(self, sequence_ids: SequenceIds, seed: int, trainer: int) -> None:
        self.position = 0
        self._sequence_ids = sequence_ids
        self._size = len(sequence_ids)
        self._opening: SequenceIds = sequence_ids[:0]
        self._opening_size = 0
        self._first_epoch = 0
        self._members: tuple[Shard, ...] = ()
        self._lineage: list[dict[str, Any]] = []
        self.trainer, self._seed = trainer, seed
        self._orders: dict[int, SequenceIds] = {}
        self._lock = threading.Lock()  # workers of one rank may read at once

    def __len__(self) -> int:
        """Sequences of a whole epoch."""
        return self._size

    @property
    def num_unread(self) -> int:
        """The number of sequences of the present epoch that were not taken yet; 0 between two epochs."""
        ahead = self._opening_size - self.position
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
        union = Shard(self._sequence_ids[:0], self._seed, self.trainer)
        union._members = tuple(members)
        union._size = sum(map(len, members))
        union._opening_size = sum(member.num_unread for member in members)
        union._lineage = [member.state_dict() for member in members]
        union._first_epoch = self._first_epoch + max(0, self.position + self.num_unread - self._opening_size) // len(
            self
        )
        return union

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of the shards that this one was united from, in plain JSON values."""
        return {"trainer": self.trainer, "position": self.position, "members": list(self._lineage)}

    @staticmethod
    def restore(state: Mapping[str, Any], dealt: Mapping[int, "Shard"]) -> "Shard":
        """The shard whose `state_dict` is `state`.

        Args:
            dealt: every trainer's shard as the run began with it, by trainer.

        Raises:
            ValueError: a position is not a number of sequences.
        """
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
        in_opening = positions < self._opening_size
        ids[in_opening] = self._opening[positions[in_opening]]
        epochs, offsets = np.divmod(positions - self._opening_size, len(self))
        for epoch in np.unique(epochs[~in_opening]):
            here = ~in_opening & (epochs == epoch)
            ids[here] = self._order(int(epoch))[offsets[here]]
        return ids

    def _put_together(self) -> None:
        if self._members:
            self._opening = np.concatenate([member.unread() for member in self._members])
            self._sequence_ids = np.concatenate([member._sequence_ids for member in self._members])
            self._members = ()

    def _order(self, epoch: int) -> SequenceIds:
        if epoch not in self._orders:
            current = (self.position - self._opening_size) // len(self)
            # All workers of a rank read the same round, so its epochs are kept and older ones are dropped.
            self._orders = {known: order for known, order in self._orders.items() if known >= current}
            order = permutation(len(self), self._seed, 1 + self.trainer, self._first_epoch + epoch)
            self._orders[epoch] = self._sequence_ids[order]
        return self._orders[epoch]
