"""Data sets whose sequences are read by number: every trainer has a shard of the ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from adloco_dist.config import SettingsError, Shards
from adloco_dist.data.protocols import Batch, SequenceTable
from adloco_dist.data.shards import Shard, deal


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
    ) -> Batch:  # fmt: skip
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
        if smallest < workers_per_trainer:
            raise SettingsError(
                f"pool.workers_per_trainer={workers_per_trainer}: a trainer's shard has {smallest} sequences "
                f"({self.num_sequences} in {num_shards} shards), less than one for each worker; "
                "use more text, shorter sequences, fewer trainers or workers"
            )

    def deal(self, num_trainers: int, workers_per_trainer: int, shards: Shards, seed: int) -> list[ShardCursor]:
        return [ShardCursor(self.table, shard) for shard in deal(self.num_sequences, num_trainers, seed, shards)]

    def restore(
        self, states: Mapping[int, Mapping[str, Any]], num_trainers: int, shards: Shards, seed: int
    ) -> dict[int, ShardCursor]:
        dealt = dict(enumerate(deal(self.num_sequences, num_trainers, seed, shards)))
        return {trainer: ShardCursor(self.table, Shard.restore(state, dealt)) for trainer, state in states.items()}

    def take_notes(self) -> list[str]:
        return []
