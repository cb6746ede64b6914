"""How the gradients of single batches deviate from that of all sequences (tools/gradients.py reports it)."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from adloco_dist.averaging.group import Group
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import Settings
from adloco_dist.data.order import permutation
from adloco_dist.data.tokens import TextTable
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import accumulate_gradient, mean_gradient

PIECE_ELEMENTS = 1 << 20
"""Inner products are summed over pieces of so many elements: a long sum in fp32 would lose what is small in it."""

Vector = npt.NDArray[np.float64]
Sequences = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """What is analysed."""

    settings: Settings
    """Settings of the run."""
    flat_model: FlatModel
    """The model at the weights, and in the mode (eval or train), that are analysed; its gradient is overwritten."""
    objective: Objective
    split: str
    table: TextTable
    """All sequences of the split."""
    ids: Sequences
    """(N,) ids of the sequences that are looked at."""
    micro_batch_size: int
    """Sequences of one micro-batch."""


@dataclass(frozen=True)
class FullGradient:
    """The gradient of the mean loss over all sequences; the same on all ranks."""

    vector: torch.Tensor
    """(num_elements,) G."""
    squared_norm: float
    """|G|^2."""
    loss: float
    """Mean loss in nats per target."""
    targets: int


@dataclass(frozen=True)
class BatchFigures:
    """Figures of J batches of equally many sequences, each (J,), in the order of the batches; equal on all ranks."""

    size: int
    """B."""
    relative_sizes: Vector
    """s_j."""
    norms: Vector
    """|g_j|."""
    squared_deviations: Vector
    """|g_j - G|^2."""
    cosines: Vector
    """Cosines of g_j with G; 0 where g_j is 0."""


def full_gradient(subject: Subject, control: ControlPlane, group: Group | None) -> FullGradient:
    """G, of whose sequences every rank takes each world_size-th; one all-reduce. Collective.

    Args:
        group: that of all ranks; None: there is one rank.
    """
    flat_model = subject.flat_model
    vector = torch.zeros_like(flat_model.gradient)
    loss, targets = 0.0, 0
    mine = subject.ids[control.rank :: control.world_size]
    for start in range(0, len(mine), subject.micro_batch_size):
        batch = subject.table.batch(mine[start : start + subject.micro_batch_size]).to(flat_model.device)
        done = accumulate_gradient(flat_model, subject.objective, batch, None)
        loss += float(done.loss_sum)
        vector.add_(flat_model.gradient, alpha=len(batch))  # the gradient of the loss sum over so many sequences
        targets += done.num_targets
    sums = control.exchange({"loss": loss, "targets": targets})
    loss, targets = sum(one["loss"] for one in sums), sum(one["targets"] for one in sums)
    if group is not None:
        group.all_reduce(vector)
    vector.div_(targets)
    return FullGradient(vector, float(inner_product(vector, vector)), loss / targets, targets)


def batch_figures(subject: Subject, full: FullGradient, size: int, control: ControlPlane) -> BatchFigures:
    """The gradients of batches of `size` sequences against the full one. Collective.

    The sequences are cut into consecutive batches of a random order, which the run's seed fixes; a rest that is smaller
    than a batch is left out. Every rank takes each world_size-th batch.
    """
    flat_model, num_sequences = subject.flat_model, len(subject.ids)
    order = subject.ids[permutation(num_sequences, subject.settings.seed)]
    num_batches = num_sequences // size
    rows = []
    for number in range(control.rank, num_batches, control.world_size):
        batch = subject.table.batch(order[number * size : (number + 1) * size]).to(flat_model.device)
        done = mean_gradient(flat_model, subject.objective, batch, subject.micro_batch_size)
        rows.append([done.num_targets, *_compared(flat_model.gradient, full.vector)])
    everything = np.empty((num_batches, 4))
    for rank, reply in enumerate(control.exchange({"rows": rows})):
        everything[rank :: control.world_size] = np.reshape(reply["rows"], (-1, 4))
    targets, squared_norms, products, squared_deviations = everything.T
    norms = np.sqrt(squared_norms)
    cosines = np.divide(products, norms * math.sqrt(full.squared_norm), out=np.zeros(num_batches), where=norms > 0)
    return BatchFigures(size, targets * num_sequences / full.targets, norms, squared_deviations, cosines)


def _compared(gradient: torch.Tensor, full: torch.Tensor) -> list[float]:
    """|g|^2, <g, G> and |g - G|^2; without a further vector: `gradient` is g - G afterwards."""
    squared_norm, product = inner_product(gradient, gradient), inner_product(gradient, full)
    gradient.sub_(full)
    return torch.stack([squared_norm, product, inner_product(gradient, gradient)]).tolist()


def inner_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """<one, other> in fp64, a scalar on their device."""
    pairs = zip(one.split(PIECE_ELEMENTS), other.split(PIECE_ELEMENTS), strict=True)
    return torch.stack([piece @ its for piece, its in pairs]).double().sum()
