"""What every estimator does, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.data.protocols import Batch
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.gradient import GradientWatcher
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """The result of a measurement."""

    statistics: GradientStatistics | None = None
    """Statistics on the trainer's lowest rank; None elsewhere, and where there was nothing to measure."""
    bytes_sent: int = 0
    """Bytes that this rank sent."""


class GradientEstimator(Protocol):
    """Measures one trainer, from the first gradients of its workers on this rank."""

    def watch(self, worker: int, slot: ComputeSlot) -> GradientWatcher:
        """The watcher of `worker`'s first update of the round; requested again where the update is repeated."""
        ...

    def state(self, worker: int) -> dict[str, torch.Tensor]:
        """What was seen of a worker in this round, where it is kept rather than looked at again; else nothing."""
        ...

    def restore(self, worker: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have seen of a worker what `state` was taken of."""
        ...

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        """Exchange what was seen. Collective over the trainer's ranks."""
        ...


class LooksAgain:
    """An estimator that keeps nothing over an interruption: the first batch is computed again at the anchor."""

    def state(self, worker: int) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, worker: int, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing was kept."""


@dataclass
class WholeBatchWatcher:
    """Calls `see` with the whole batch and its number of targets once its gradient is complete."""

    see: Callable[[Batch, int], None]

    def chunks(self, batch: Batch) -> Sequence[Batch]:
        return [batch]

    def observe(self, chunk: Batch, num_targets: int) -> None:
        self.see(chunk, num_targets)
