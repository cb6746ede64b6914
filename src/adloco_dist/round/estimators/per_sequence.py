"""The exact estimator: every sequence's own gradient."""

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.config import Settings
from adloco_dist.data.protocols import Batch
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import GradientWatcher
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.estimators.exchange import measure_rows, relative_sizes
from adloco_dist.round.estimators.protocol import LooksAgain, Measured, WholeBatchWatcher


class PerSequenceEstimator(LooksAgain):
    """Measures every sequence's own gradient, exactly; takes the memory and traffic of one gradient per sequence."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rows: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, torch.Tensor] = {}

    def watch(self, worker: int, slot: ComputeSlot) -> GradientWatcher:
        def see(batch: Batch, num_targets: int) -> None:
            self._rows[worker], self._sizes[worker] = per_sequence_gradients(slot.flat_model, slot.objective, batch)

        return WholeBatchWatcher(see)

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> Measured:
        measured = measure_rows(self._rows, self._sizes, trainer, layout, group, self._settings, None)
        self._rows.clear()
        self._sizes.clear()
        return measured


def per_sequence_gradients(
    flat_model: FlatModel, objective: Objective, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradient of every sequence's own mean loss, at the weights that the module points at.

    Returns:
        (B, num_elements), and the sequences' sizes, (B, 1): their targets over the mean per sequence.
    """
    rows = flat_model.weights.new_zeros(len(batch), flat_model.num_elements)
    targets = rows.new_zeros(len(batch), 1)
    named = {name: parameter for name, parameter in flat_model.module.named_parameters() if parameter.requires_grad}
    for number, (row, sequence) in enumerate(zip(rows, batch.split(1), strict=True)):
        with flat_model.autocast():
            loss, targets[number] = objective.loss(flat_model.module, sequence)
        gradients = torch.autograd.grad(loss / targets[number, 0], list(named.values()), allow_unused=True)
        views = flat_model.parameter_layout.views(row)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                views[name].copy_(gradient)
    return rows, relative_sizes(targets, len(batch))
