"""Gradient statistics of a trainer from the first update of a round, when all its workers stand at the anchor.

An estimator's watchers see every worker's first gradient while it is accumulated. After the inner phase it
exchanges what they kept; the trainer's lowest rank then knows the statistics (design, section 3.1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from adloco_dist.cluster.groups import Group
from adloco_dist.config import BatchRequest, Estimator, GradientNorm, Settings
from adloco_dist.data.batch import Batch, relative_sizes
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.statistics import (
    GradientStatistics,
    num_chunks,
    statistics_from_gram,
    statistics_from_moments,
)
from adloco_dist.losses import losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.lane import Lane
from adloco_dist.pool.sketch import BUCKETS
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


class GradientEstimator(Protocol):
    """Measures one trainer, from the first gradients of its workers on this rank."""

    def watch(self, worker: int, lane: Lane) -> GradientWatcher:
        """Who watches `worker`'s first update of the round; asked for anew where the update begins again."""
        ...

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        """Exchange what was seen. Collective over the trainer's ranks."""
        ...


def new_estimator(settings: Settings) -> GradientEstimator:
    """The estimator of one trainer that the settings name."""
    match settings.batching.estimator:
        case Estimator.sketch:
            return SketchEstimator(settings)
        case Estimator.workers:
            return WorkersEstimator(settings)
        case Estimator.per_sequence:
            return PerSequenceEstimator(settings)


@dataclass
class _SketchWatcher:
    lane: Lane
    most_chunks: int
    sums: list[torch.Tensor] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def chunks(self, batch: Batch) -> Sequence[Batch]:
        pieces = batch.pieces(num_chunks(len(batch), self.most_chunks))
        self.sizes = relative_sizes(batch, pieces)
        return pieces

    def observe(self, chunk: Batch) -> None:
        self.sums.append(self.lane.sketch(self.lane.flat_model.gradient))


class SketchEstimator:
    """Sketches of the accumulated gradient after each chunk; their differences are the chunks' own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watchers: dict[int, _SketchWatcher] = {}

    def watch(self, worker: int, lane: Lane) -> GradientWatcher:
        self._watchers[worker] = _SketchWatcher(lane, self._settings.batching.chunks)
        return self._watchers[worker]

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        rows, sizes = {}, {}
        for worker, seen in self._watchers.items():
            ends = torch.stack(seen.sums)
            sizes[worker] = torch.tensor(seen.sizes, dtype=ends.dtype, device=ends.device)[:, None]
            chunks = ends.diff(dim=0, prepend=torch.zeros_like(ends[:1]))
            rows[worker] = chunks * (sizes[worker].sum() / sizes[worker])
        self._watchers.clear()
        return _measure_rows(rows, sizes, trainer, layout, group, self._settings, BUCKETS)


@dataclass
class _WholeBatchWatcher:
    """Hands the whole batch on, once its gradient is there."""

    lane: Lane
    see: Callable[[Lane, Batch], None]

    def chunks(self, batch: Batch) -> Sequence[Batch]:
        return [batch]

    def observe(self, chunk: Batch) -> None:
        self.see(self.lane, chunk)


class PerSequenceEstimator:
    """Every sequence's own gradient, exactly: memory and traffic of one gradient per sequence."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rows: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, torch.Tensor] = {}

    def watch(self, worker: int, lane: Lane) -> GradientWatcher:
        def see(lane: Lane, batch: Batch) -> None:
            self._rows[worker] = rows = per_sequence_gradients(lane.flat_model, batch)
            self._sizes[worker] = rows.new_tensor(relative_sizes(batch, batch.split(1)))[:, None]

        return _WholeBatchWatcher(lane, see)

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        measured = _measure_rows(self._rows, self._sizes, trainer, layout, group, self._settings, None)
        self._rows.clear()
        self._sizes.clear()
        return measured


@dataclass
class _FirstGradient:
    """What is kept of a worker's first gradient beside its part in the sum."""

    lane: Lane
    squared_norm: torch.Tensor
    batch: Batch
    seed: int


class WorkersEstimator:
    """Every worker's whole first gradient, averaged over the workers: what AdLoCo's authors do.

    Keeps the sum over this rank's workers, one vector. The inner-product tests need every gradient again once the
    mean is known; it is computed a second time rather than kept. (Without such a test, V_ip stays 0.) Workers must
    have their turns one after the other.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sum = torch.zeros(0)
        self._seen: dict[int, _FirstGradient] = {}

    def watch(self, worker: int, lane: Lane) -> GradientWatcher:
        seed = torch.initial_seed()

        def see(lane: Lane, batch: Batch) -> None:
            gradient = lane.flat_model.gradient
            self._sum = self._sum.add_(gradient) if self._seen else gradient.clone()
            self._seen[worker] = _FirstGradient(lane, gradient @ gradient, batch, seed)

        return _WholeBatchWatcher(lane, see)

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
        moments, gathered_bytes = _gather(rows, trainer, layout, group)
        bytes_sent = ring_bytes_sent(mean, group) + gathered_bytes
        if moments is None:
            return Measured(None, bytes_sent)
        norms, products = moments.double().cpu().numpy().T
        sizes = np.full(num_workers, float(len(next(iter(self._seen.values())).batch)))
        return Measured(statistics_from_moments(norms, products, float(mean_squared_norm), sizes), bytes_sent)

    def _product(self, seen: _FirstGradient, trainer: Trainer, mean: torch.Tensor) -> torch.Tensor:
        """<g_m, gbar>, where a test asks for it, of the worker's first batch at the anchor, which has not moved yet."""
        if self._settings.batching.request is BatchRequest.norm_test:
            return mean @ mean
        flat_model = seen.lane.flat_model
        torch.manual_seed(seen.seed)  # the same dropout
        flat_model.point_at(trainer.anchor.to(flat_model.device))
        accumulate_gradient(flat_model, flat_model.module, seen.batch, flat_model.capacity)
        return flat_model.gradient @ mean


def per_sequence_gradients(flat_model: FlatModel, batch: Batch) -> torch.Tensor:
    """The gradient of every sequence's own mean loss at the weights that the module points at (torch.func).

    Returns:
        (B, num_elements).
    """
    present = {name: getattr(batch, name) for name in ("tokens", "lengths", "labels")}
    inputs = {name: value for name, value in present.items() if value is not None}
    inputs["num_targets"] = torch.tensor(batch.num_targets, device=batch.tokens.device)

    def mean_loss(parameters: dict[str, torch.Tensor], sequence: dict[str, torch.Tensor]) -> torch.Tensor:
        def forward(**inputs: Any) -> Any:
            return functional_call(flat_model.module, parameters, (), inputs)

        alone = {name: value[None] for name, value in sequence.items() if name != "num_targets"}
        # Not in bf16: autocast has no batching rules.
        return losses(forward, Batch(**alone, num_targets=(1,))).sum() / sequence["num_targets"]

    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no batching rule
        gradients = vmap(grad(mean_loss), in_dims=(None, 0), randomness="different")(
            flat_model.named_views(flat_model.weights), inputs
        )
    rows = flat_model.weights.new_zeros(len(batch), flat_model.num_elements)
    for name, view in flat_model.named_views(rows).items():
        view.copy_(gradients[name])
    return rows


def _measure_rows(
    rows: Mapping[int, torch.Tensor],
    sizes: Mapping[int, torch.Tensor],
    trainer: Trainer,
    layout: Layout,
    group: Group | None,
    settings: Settings,
    sketch_size: int | None,
) -> Measured:
    """Statistics from the inner products of all workers' rows.

    Args:
        rows: by worker, (K, width): mean gradients of its K chunks, or sketches of them.
        sizes: by worker, (K, 1): sequences of each chunk, in parts of one where padding makes them unequal.
    """
    num_chunks_each = len(next(iter(sizes.values())))
    if layout.num_workers(trainer.id) * num_chunks_each < 2:
        return Measured()
    with_sizes = {worker: torch.cat([rows[worker], sizes[worker]], dim=1) for worker in rows}
    everything, bytes_sent = _gather(with_sizes, trainer, layout, group)
    if everything is None:
        return Measured(None, bytes_sent)
    everything, all_sizes = everything[:, :-1].double(), everything[:, -1].double()
    gram = (everything @ everything.T).cpu().numpy()
    plugin = settings.batching.gradient_norm is GradientNorm.plugin
    return Measured(statistics_from_gram(gram, all_sizes.cpu().numpy(), plugin, sketch_size), bytes_sent)


def _gather(
    rows: Mapping[int, torch.Tensor], trainer: Trainer, layout: Layout, group: Group | None
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
    received = group.gather(padded)
    if not received:
        return None, padded.nbytes
    by_worker = {}
    for rank, part in zip(ranks, received, strict=True):
        for place, worker in enumerate(hosted[rank]):
            by_worker[worker] = part[place * height : (place + 1) * height]
    return torch.cat([by_worker[worker] for worker in sorted(by_worker)]), 0
