"""A trainer's sequences and the cursor into them (design: Data)."""

import numpy as np
import numpy.typing as npt

SequenceIds = npt.NDArray[np.int64]


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of range(count), the same on every machine and numpy version for the same key.

    The raw streams of numpy's bit generators are stable by contract; `Generator.permutation` is not.
    """
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(draws, kind="stable")


def shard_sizes(num_sequences: int, num_trainers: int) -> list[int]:
    """Sequences of the shards that `deal` makes."""
    return [len(range(trainer, num_sequences, num_trainers)) for trainer in range(num_trainers)]


def deal(num_sequences: int, num_trainers: int, seed: int) -> list[SequenceIds]:
    """Split range(num_sequences) into disjoint random shards, equal to within one sequence."""
    order = permutation(num_sequences, seed)
    return [np.sort(order[trainer::num_trainers]) for trainer in range(num_trainers)]


class Shard:
    """The sequences of one trainer, read in a fresh random order every epoch.

    `cursor` counts the sequences taken so far; every rank of the trainer moves it by the same amount. Update h
    of a round reads positions cursor + h B to cursor + (h + 1) B, of which worker m takes the m-th run of b: an
    update may straddle two epochs, and each sequence is used exactly once per epoch.
    """

    def __init__(self, sequence_ids: SequenceIds, seed: int, trainer: int) -> None:
        self.sequence_ids = sequence_ids
        self.cursor = 0
        self._key = (seed, 1 + trainer)
        self._orders: dict[int, SequenceIds] = {}

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def peek(self, offset: int, count: int) -> SequenceIds:
        """The ids of `count` sequences that begin `offset` after the cursor; the cursor stays."""
        epochs, places = np.divmod(self.cursor + offset + np.arange(count), len(self))
        ids = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._order(int(epoch))[places[here]]
        return ids

    def advance(self, count: int) -> None:
        self.cursor += count

    def _order(self, epoch: int) -> SequenceIds:
        if epoch not in self._orders:
            current = self.cursor // len(self)
            # Workers of one rank take turns over the same round, so its epochs are kept and older ones dropped.
            self._orders = {known: order for known, order in self._orders.items() if known >= current}
            self._orders[epoch] = self.sequence_ids[permutation(len(self), *self._key, epoch)]
        return self._orders[epoch]
