"""The authors' estimator: full gradients averaged over the workers."""

from dataclasses import dataclass

import torch

from adloco_dist.averaging.group import Group, ring_bytes_sent
from adloco_dist.config import BatchRequest, Settings
from adloco_dist.data.protocols import Batch
from adloco_dist.noise.estimation import statistics_from_moments
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.gradient import GradientWatcher, mean_gradient
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.estimators.exchange import gather_rows
from adloco_dist.round.estimators.protocol import LooksAgain, Measured, WholeBatchWatcher


@dataclass
class _FirstGradient:
    """What is kept of a worker's first gradient beside its part in the sum."""

    slot: ComputeSlot
    squared_norm: torch.Tensor
    batch: Batch
    seed: int


class WorkersEstimator(LooksAgain):
    """Averages every worker's whole first gradient over the workers, which is what AdLoCo's authors do.

    Keeps the sum over this rank's workers, one vector. The inner-product tests need every gradient again once the
    mean is known; it is computed a second time rather than kept. (Without such a test, V_ip stays 0.) Workers must
    take their updates one after the other.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sum = torch.zeros(0)
        self._seen: dict[int, _FirstGradient] = {}

    def watch(self, worker: int, slot: ComputeSlot) -> GradientWatcher:
        seed = torch.initial_seed()

        def see(batch: Batch, num_targets: int) -> None:
            gradient, scale = slot.flat_model.gradient, len(batch) / num_targets
            self._sum = self._sum.add_(gradient, alpha=scale) if self._seen else gradient * scale
            self._seen[worker] = _FirstGradient(slot, gradient @ gradient * scale**2, batch, seed)

        return WholeBatchWatcher(see)

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        measured = self._exchange(trainer, layout, group) if layout.num_workers(trainer.id) >= 2 else Measured()
        self._sum = torch.zeros(0)
        self._seen.clear()
        return measured

    def _exchange(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        num_workers = layout.num_workers(trainer.id)
        if group is not None:
            group.all_reduce(self._sum)
        mean = self._sum.div_(num_workers)
        mean_squared_norm = mean @ mean
        rows = {
            worker: torch.stack([seen.squared_norm, self._product(seen, trainer, mean)])[None]
            for worker, seen in self._seen.items()
        }
        moments, gathered_bytes = gather_rows(rows, trainer, layout, group)
        bytes_sent = ring_bytes_sent(mean.nbytes, 1 if group is None else len(group.ranks)) + gathered_bytes
        if moments is None:
            return Measured(None, bytes_sent)
        norms, products = moments.T
        sizes = torch.full((num_workers,), float(len(next(iter(self._seen.values())).batch)))
        return Measured(statistics_from_moments(norms, products, float(mean_squared_norm), sizes), bytes_sent)

    def _product(self, seen: _FirstGradient, trainer: Trainer, mean: torch.Tensor) -> torch.Tensor:
        """<g_m, gbar>, where a test asks for it, of the worker's first batch at the anchor, which has not moved yet."""
        if self._settings.batching.request is BatchRequest.norm_test:
            return mean @ mean
        flat_model = seen.slot.flat_model
        torch.manual_seed(seen.seed)  # the same dropout
        flat_model.point_at(trainer.anchor.to(flat_model.device))
        mean_gradient(flat_model, seen.slot.objective, seen.batch, flat_model.capacity)
        return flat_model.gradient @ mean
