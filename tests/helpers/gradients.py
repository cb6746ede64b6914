"""Exact gradients of single sequences, which sketched statistics are compared with."""

import torch

from adloco_dist.data.protocols import Batch
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.estimator import relative_sizes
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import mean_gradient


def per_sequence_gradients(
    flat_model: FlatModel, objective: Objective, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradient of every sequence's own mean loss, at the weights that the module points at.

    Returns:
        (B, num_elements), and the sequences' sizes, (B, 1): their targets over the mean per sequence.
    """
    rows = flat_model.weights.new_zeros(len(batch), flat_model.num_elements)
    targets = rows.new_zeros(len(batch), 1)
    for number, sequence in enumerate(batch.split(1)):
        targets[number] = mean_gradient(flat_model, objective, sequence, None).num_targets
        rows[number] = flat_model.gradient
    return rows, relative_sizes(targets, len(batch))
