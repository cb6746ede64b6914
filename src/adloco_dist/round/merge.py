"""Combining the anchors of several trainers into one vector."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from adloco_dist.decisions.layout import Layout
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer


def combine(
    trainers: Sequence[Trainer],
    shares: Mapping[int, float],
    layout: Layout,
    flat_model: FlatModel,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """sum_i shares[i] x_i over the trainers of the whole pool, on every rank of `group`.

    Each trainer is contributed once, by its lowest rank. A share of zero contributes nothing at all, not zero
    times an anchor that may not be finite.

    Returns:
        The flat model's gradient, which holds the sum until something else uses that buffer.
    """
    rank = dist.get_rank()
    flat_model.payload.zero_()
    for trainer in trainers:
        share = shares.get(trainer.id, 0.0)
        if share and layout.ranks(trainer.id)[0] == rank:
            flat_model.gradient.add_(trainer.anchor.to(flat_model.device), alpha=share)
    if group is not None:
        dist.all_reduce(flat_model.payload, group=group)
    return flat_model.gradient
