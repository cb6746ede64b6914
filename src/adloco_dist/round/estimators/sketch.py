"""The default estimator: sketches of chunks of every worker's first gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.config import Settings
from adloco_dist.data.protocols import Batch
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.noise.statistics import num_chunks
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.gradient import GradientWatcher
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.estimators.exchange import measure_rows, relative_sizes
from adloco_dist.round.estimators.protocol import Measured


@dataclass
class _Seen:
    """What was seen of a worker's first gradient."""

    sums: list[torch.Tensor] = field(default_factory=list)
    """Sketches of the accumulated gradient after each chunk."""
    num_targets: list[int] = field(default_factory=list)
    """Targets of each chunk."""
    num_sequences: int = 0


@dataclass
class _SketchWatcher:
    slot: ComputeSlot
    max_chunks: int
    seen: _Seen = field(default_factory=_Seen)

    def chunks(self, batch: Batch) -> Sequence[Batch]:
        self.seen.num_sequences = len(batch)
        return batch.chunks(num_chunks(len(batch), self.max_chunks))

    def observe(self, chunk: Batch, num_targets: int) -> None:
        self.seen.num_targets.append(num_targets)
        self.seen.sums.append(self.slot.flat_model.sketch(self.slot.sketch))


class SketchEstimator:
    """Sketches the accumulated gradient after each chunk; their differences are the chunks' own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: dict[int, _Seen] = {}

    def watch(self, worker: int, slot: ComputeSlot) -> GradientWatcher:
        watcher = _SketchWatcher(slot, self._settings.batching.chunks)
        self._seen[worker] = watcher.seen
        return watcher

    def state(self, worker: int) -> dict[str, torch.Tensor]:
        if (seen := self._seen.get(worker)) is None:  # it has not taken its first update
            return {}
        return {
            "sketches": torch.cat(seen.sums),
            "chunk_targets": torch.tensor(seen.num_targets),
            "num_sequences": torch.tensor(seen.num_sequences),
        }

    def restore(self, worker: int, state: Mapping[str, torch.Tensor]) -> None:
        sums = list(state["sketches"].view(len(state["chunk_targets"]), -1))
        self._seen[worker] = _Seen(sums, state["chunk_targets"].tolist(), int(state["num_sequences"]))

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        rows, sizes = {}, {}
        for worker, seen in sorted(self._seen.items()):
            joined = torch.cat([torch.stack(seen.sums), seen.sums[0].new_tensor(seen.num_targets)[:, None]], dim=1)
            trainer.flat_model.shards.sum(joined)  # of parts of the gradient, and of shares of the batch
            sums, targets = joined[:, :-1], joined[:, -1:]
            sizes[worker] = relative_sizes(targets, seen.num_sequences)
            chunks = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
            rows[worker] = chunks * (seen.num_sequences / targets)  # what was seen are sums over so many sequences
        self._seen.clear()
        return measure_rows(rows, sizes, trainer, layout, group, self._settings, BUCKETS)
