"""A trainer's sequences and the cursor into them (design: Data)."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from adloco_dist.config import Shards
from adloco_dist.data.order import permutation

SequenceIds = npt.NDArray[np.int64]


def deal(num_sequences: int, num_trainers: int, seed: int, policy: Shards = Shards.disjoint) -> list["Shard"]:
    """Every trainer's shard of range(num_sequences).

    disjoint: random parts, equal to within one sequence. shared: all of it for each trainer.
    """
    if policy is Shards.shared:
        everything = np.arange(num_sequences)
        return [Shard(everything, seed, trainer) for trainer in range(num_trainers)]
    order = permutation(num_sequences, seed)
    return [Shard(order[trainer::num_trainers], seed, trainer) for trainer in range(num_trainers)]


ShardState = dict[str, Any]
"""trainer, cursor, and members: the states of the shards that it was united from."""


class Shard:
    """The sequences of one trainer, read in a fresh random order every epoch.

    `cursor` counts the sequences taken so far; everybody moves it by the same amount, as the plan says. Update h of a
    round reads positions cursor + h B to cursor + (h + 1) B, of which worker m takes the m-th run of b: an update may
    straddle two epochs, and each sequence is used exactly once per epoch.

    A shard that was united from others begins with an opening: what each of them had left unread.
    """

    def __init__(self, sequence_ids: SequenceIds, seed: int, trainer: int) -> None:
        self.cursor = 0
        self._sequence_ids = sequence_ids
        self._size = len(sequence_ids)
        self._opening: SequenceIds = sequence_ids[:0]
        self._opening_size = 0
        self._first_epoch = 0
        self._members: tuple[Shard, ...] = ()
        self._lineage: list[ShardState] = []
        self._seed, self._trainer = seed, trainer
        self._orders: dict[int, SequenceIds] = {}
        self._lock = threading.Lock()  # workers of one rank may read at once

    def __len__(self) -> int:
        """Sequences of a whole epoch."""
        return self._size

    @property
    def num_unread(self) -> int:
        """Sequences of the present epoch that were not taken yet; 0 between two epochs."""
        ahead = self._opening_size - self.cursor
        return ahead if ahead >= 0 else ahead % len(self)

    def unread(self) -> SequenceIds:
        """Their ids, in the order in which they would have been taken."""
        return self.peek(0, self.num_unread)

    def united(self, members: Sequence["Shard"]) -> "Shard":
        """This trainer's shard after it has taken in all `members`, itself among them, which are read no more.

        It begins with what each of them has left unread, in the order given; then come epochs of the union, in orders
        that no epoch of the trainer had. Ids are put together when they are read: a rank without a worker of the
        trainer never needs them.
        """
        union = Shard(self._sequence_ids[:0], self._seed, self._trainer)
        union._members = tuple(members)
        union._size = sum(map(len, members))
        union._opening_size = sum(member.num_unread for member in members)
        union._lineage = [member.state() for member in members]
        union._first_epoch = self._first_epoch + max(0, self.cursor + self.num_unread - self._opening_size) // len(self)
        return union

    def state(self) -> "ShardState":
        """What brings this shard about again, in plain JSON values: where it stands, and what it was united from."""
        return {"trainer": self._trainer, "cursor": self.cursor, "members": list(self._lineage)}

    @staticmethod
    def restored(state: "ShardState", dealt: Mapping[int, "Shard"]) -> "Shard":
        """The shard that `state` was taken of.

        Args:
            dealt: every trainer's shard as the run began with it, by id.
        """
        origin = dealt[state["trainer"]]
        shard = Shard(origin._sequence_ids, origin._seed, origin._trainer)
        if state["members"]:
            members = [Shard.restored(member, dealt) for member in state["members"]]
            (survivor,) = [member for member in members if member._trainer == shard._trainer]
            shard = survivor.united(members)
        shard.cursor = state["cursor"]
        return shard

    @property
    def size(self) -> int | None:
        """Sequences of a whole epoch."""
        return self._size

    def ids(self, worker: int, num_workers: int, update: int, local_batch: int) -> SequenceIds:
        """What a worker takes in an update of the present round."""
        return self.peek((update * num_workers + worker) * local_batch, local_batch)

    def advance(self, updates: int, num_workers: int, local_batch: int, places: object = None) -> None:
        """End a round; `places` are of streams."""
        self.cursor += updates * num_workers * local_batch

    def peek(self, offset: int, count: int) -> SequenceIds:
        """The ids of `count` sequences that begin `offset` after the cursor; the cursor stays."""
        with self._lock:
            self._put_together()
            return self._read(self.cursor + offset, count)

    def _read(self, start: int, count: int) -> SequenceIds:
        positions = start + np.arange(count)
        ids = np.empty(count, dtype=np.int64)
        in_opening = positions < self._opening_size
        ids[in_opening] = self._opening[positions[in_opening]]
        epochs, places = np.divmod(positions - self._opening_size, len(self))
        for epoch in np.unique(epochs[~in_opening]):
            here = ~in_opening & (epochs == epoch)
            ids[here] = self._order(int(epoch))[places[here]]
        return ids

    def _put_together(self) -> None:
        if self._members:
            self._opening = np.concatenate([member.unread() for member in self._members])
            self._sequence_ids = np.concatenate([member._sequence_ids for member in self._members])
            self._members = ()

    def _order(self, epoch: int) -> SequenceIds:
        if epoch not in self._orders:
            current = (self.cursor - self._opening_size) // len(self)
            # Workers of one rank take turns over the same round, so its epochs are kept and older ones dropped.
            self._orders = {known: order for known, order in self._orders.items() if known >= current}
            order = permutation(len(self), self._seed, 1 + self._trainer, self._first_epoch + epoch)
            self._orders[epoch] = self._sequence_ids[order]
        return self._orders[epoch]
