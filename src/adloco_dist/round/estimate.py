"""Gradient statistics of a trainer from the first update of a round, when all its workers stand at the anchor.

An estimator sees every worker's first gradient while it is accumulated (`start`, `chunks`, `observe`) and, after the
inner phase, exchanges what it kept; the trainer's lowest rank then knows the statistics (design, section 3.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from adloco_dist.config import BatchRequest, Estimator, GradientNorm, Settings
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.statistics import (
    GradientStatistics,
    num_chunks,
    statistics_from_gram,
    statistics_from_moments,
)
from adloco_dist.models import token_losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.sketch import BUCKETS, Sketch
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.gradient import GradientWatcher, accumulate_gradient
from adloco_dist.round.outer import ring_bytes_sent


@dataclass(frozen=True)
class Measured:
    """What came of a measurement."""

    statistics: GradientStatistics | None = None
    """On the trainer's lowest rank; None elsewhere, and where there was nothing to measure."""
    bytes_sent: int = 0
    """By this rank."""


class GradientEstimator(GradientWatcher, Protocol):
    """Watches the first gradients of one trainer's workers on this rank."""

    def start(self, worker: int) -> None:
        """`worker` begins its first update of the round, or begins it again."""

    def measure(self, trainer: Trainer, layout: Layout, group: dist.ProcessGroup | None) -> Measured:
        """Exchange what was seen. Collective over the trainer's ranks."""
        ...


def new_estimator(flat_model: FlatModel, sketch: Sketch, settings: Settings) -> GradientEstimator:
    """The estimator of one trainer that the settings name; the sketch is shared by the rank's trainers."""
    match settings.batching.estimator:
        case Estimator.sketch:
            return SketchEstimator(flat_model, sketch, settings)
        case Estimator.workers:
            return WorkersEstimator(flat_model, settings)
        case Estimator.per_sequence:
            return PerSequenceEstimator(flat_model, settings)


class SketchEstimator:
    """Sketches of the accumulated gradient after each chunk; their differences are the chunks' own."""

    def __init__(self, flat_model: FlatModel, sketch: Sketch, settings: Settings) -> None:
        self._flat_model, self._sketch, self._settings = flat_model, sketch, settings
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._sizes: list[int] = []
        self._worker = 0

    def start(self, worker: int) -> None:
        self._worker = worker
        self._sums[worker], self._sizes = [], []

    def chunks(self, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        return tokens.tensor_split(num_chunks(len(tokens), self._settings.batching.chunks))

    def observe(self, chunk: torch.Tensor) -> None:
        self._sums[self._worker].append(self._sketch(self._flat_model.gradient))
        self._sizes.append(len(chunk))

    def measure(self, trainer: Trainer, layout: Layout, group: dist.ProcessGroup | None) -> Measured:
        sizes = torch.tensor(self._sizes, device=self._flat_model.device)[:, None]
        rows = {}
        for worker, sums in self._sums.items():
            ends = torch.stack(sums)
            rows[worker] = ends.diff(dim=0, prepend=torch.zeros_like(ends[:1])) * (sizes.sum() / sizes)
        self._sums.clear()
        return _measure_rows(rows, self._sizes, trainer, layout, group, self._settings, BUCKETS)


class _WholeBatch:
    """What the two estimators share that see a worker's batch in one piece."""

    def __init__(self, flat_model: FlatModel, settings: Settings) -> None:
        self._flat_model, self._settings = flat_model, settings
        self._worker = 0

    def start(self, worker: int) -> None:
        self._worker = worker

    def chunks(self, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        return [tokens]


class PerSequenceEstimator(_WholeBatch):
    """Every sequence's own gradient, exactly: memory and traffic of one gradient per sequence."""

    def __init__(self, flat_model: FlatModel, settings: Settings) -> None:
        super().__init__(flat_model, settings)
        self._rows: dict[int, torch.Tensor] = {}

    def observe(self, chunk: torch.Tensor) -> None:
        self._rows[self._worker] = per_sequence_gradients(self._flat_model, chunk)

    def measure(self, trainer: Trainer, layout: Layout, group: dist.ProcessGroup | None) -> Measured:
        sizes = [1] * len(next(iter(self._rows.values())))
        measured = _measure_rows(self._rows, sizes, trainer, layout, group, self._settings, None)
        self._rows.clear()
        return measured


class WorkersEstimator(_WholeBatch):
    """Every worker's whole first gradient, averaged over the workers: what AdLoCo's authors do.

    Keeps the sum over this rank's workers, one vector. The inner-product tests need every gradient again once the
    mean is known; it is computed a second time rather than kept. (Without such a test, V_ip stays 0.)
    """

    def __init__(self, flat_model: FlatModel, settings: Settings) -> None:
        super().__init__(flat_model, settings)
        self._sum = torch.zeros_like(flat_model.gradient)
        self._squared_norms: dict[int, torch.Tensor] = {}
        self._batches: dict[int, torch.Tensor] = {}
        self._seeds: dict[int, int] = {}

    def start(self, worker: int) -> None:
        super().start(worker)
        self._seeds[worker] = torch.initial_seed()

    def observe(self, chunk: torch.Tensor) -> None:
        gradient = self._flat_model.gradient
        self._sum.add_(gradient)
        self._squared_norms[self._worker] = gradient @ gradient
        self._batches[self._worker] = chunk

    def measure(self, trainer: Trainer, layout: Layout, group: dist.ProcessGroup | None) -> Measured:
        measured = self._exchange(trainer, layout, group) if layout.num_workers(trainer.id) >= 2 else Measured()
        self._sum.zero_()
        for seen in (self._squared_norms, self._batches, self._seeds):
            seen.clear()
        return measured

    def _exchange(self, trainer: Trainer, layout: Layout, group: dist.ProcessGroup | None) -> Measured:
        num_workers = layout.num_workers(trainer.id)
        if group is not None:
            dist.all_reduce(self._sum, group=group)
        mean = self._sum.div_(num_workers)
        mean_squared_norm = mean @ mean
        rows = {
            worker: torch.stack([squared_norm, self._product(worker, trainer, mean)])[None]
            for worker, squared_norm in self._squared_norms.items()
        }
        moments, gathered_bytes = _gather(rows, trainer, layout, group)
        bytes_sent = ring_bytes_sent(mean, group) + gathered_bytes
        if moments is None:
            return Measured(None, bytes_sent)
        norms, products = moments.double().cpu().numpy().T
        sizes = np.full(num_workers, float(len(next(iter(self._batches.values())))))
        return Measured(statistics_from_moments(norms, products, float(mean_squared_norm), sizes), bytes_sent)

    def _product(self, worker: int, trainer: Trainer, mean: torch.Tensor) -> torch.Tensor:
        """<g_m, gbar>, where a test asks for it, of the worker's first batch at the anchor, which has not moved yet."""
        if self._settings.batching.request is BatchRequest.norm_test:
            return mean @ mean
        flat_model, tokens = self._flat_model, self._batches[worker]
        torch.manual_seed(self._seeds[worker])  # the same dropout
        flat_model.point_at(trainer.anchor.to(flat_model.device))
        accumulate_gradient(flat_model, flat_model.module, tokens, flat_model.capacity)
        return flat_model.gradient @ mean


def per_sequence_gradients(flat_model: FlatModel, tokens: torch.Tensor) -> torch.Tensor:
    """The gradient of every sequence's own mean loss at the weights that the module points at (torch.func).

    Args:
        tokens: (B, L + 1) ids.

    Returns:
        (B, num_elements).
    """

    def mean_loss(parameters: dict[str, torch.Tensor], sequence: torch.Tensor) -> torch.Tensor:
        def forward(**inputs: Any) -> Any:
            return functional_call(flat_model.module, parameters, (), inputs)

        with flat_model.autocast():
            return token_losses(forward, sequence[None]).mean()

    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no batching rule
        gradients = vmap(grad(mean_loss), in_dims=(None, 0), randomness="different")(
            flat_model.named_views(flat_model.weights), tokens
        )
    rows = flat_model.weights.new_zeros(len(tokens), flat_model.num_elements)
    for name, view in flat_model.named_views(rows).items():
        view.copy_(gradients[name])
    return rows


def _measure_rows(
    rows: Mapping[int, torch.Tensor],
    sizes: Sequence[int],
    trainer: Trainer,
    layout: Layout,
    group: dist.ProcessGroup | None,
    settings: Settings,
    sketch_size: int | None,
) -> Measured:
    """Statistics from the inner products of all workers' rows.

    Args:
        rows: by worker, (K, width): mean gradients of its K chunks, or sketches of them.
        sizes: sequences of each of a worker's K chunks, the same for all workers.
    """
    num_workers = layout.num_workers(trainer.id)
    if num_workers * len(sizes) < 2:
        return Measured()
    everything, bytes_sent = _gather(rows, trainer, layout, group)
    if everything is None:
        return Measured(None, bytes_sent)
    everything = everything.double()
    gram = (everything @ everything.T).cpu().numpy()
    plugin = settings.batching.gradient_norm is GradientNorm.plugin
    all_sizes = np.tile(np.array(sizes, dtype=np.float64), num_workers)
    return Measured(statistics_from_gram(gram, all_sizes, plugin, sketch_size), bytes_sent)


def _gather(
    rows: Mapping[int, torch.Tensor], trainer: Trainer, layout: Layout, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor | None, int]:
    """All workers' rows, in the order of their ids, on the trainer's lowest rank.

    Each rank sends its rows once; an all-gather would send them to ranks that have no use for them.

    Args:
        rows: by worker hosted here, (K, width) each.

    Returns:
        (M K, width) or None, and the bytes that this rank sent.
    """
    if group is None:
        return torch.cat([rows[worker] for worker in sorted(rows)]), 0
    ranks = layout.ranks(trainer.id)
    hosted = {rank: layout.workers_on(rank, trainer.id) for rank in ranks}
    most = max(len(workers) for workers in hosted.values())
    height, width = next(iter(rows.values())).shape
    mine = torch.cat([rows[worker] for worker in sorted(rows)])
    padded = torch.cat([mine, mine.new_zeros(most * height - len(mine), width)])
    is_root = dist.get_rank() == ranks[0]
    received = [torch.empty_like(padded) for _ in ranks] if is_root else None
    dist.gather(padded, received, dst=ranks[0], group=group)
    if received is None:
        return None, padded.nbytes
    by_worker = {}
    for rank, part in zip(ranks, received, strict=True):
        for place, worker in enumerate(hosted[rank]):
            by_worker[worker] = part[place * height : (place + 1) * height]
    return torch.cat([by_worker[worker] for worker in sorted(by_worker)]), 0
