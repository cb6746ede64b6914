"""Tables of sequences that tests look into."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from adloco_dist.config import Shards
from adloco_dist.data.indexed import IndexedDataset, ShardCursor
from adloco_dist.data.tokens import TokenBatch, TokenTable


@dataclass(frozen=True)
class CountingTable(TokenTable):
    """Remembers which sequences were read."""

    read: list[int] = field(default_factory=list)

    def batch(self, ids: npt.NDArray[np.int64]) -> TokenBatch:
        self.read.extend(ids.tolist())
        return super().batch(ids)


def deal(num_sequences: int, num_trainers: int, seed: int, shards: Shards = Shards.disjoint) -> list[ShardCursor]:
    """Shards of a table of so many sequences, whose tokens mean nothing."""
    table = TokenTable([np.zeros(num_sequences + 1, np.uint16)], sequence_length=1)
    return IndexedDataset(table).deal(num_trainers, 1, shards, seed)


def ids_of_shard(shard: ShardCursor) -> list[int]:
    """The next sequences of a shard, as many as an epoch has."""
    return shard.peek(0, shard.size).tolist()


def advance(shard: ShardCursor, count: int) -> None:
    shard.advance(1, [count], {})
