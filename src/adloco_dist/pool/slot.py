"""What one model instance computes on; as many instances as there are slots compute concurrently."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from adloco_dist.config import Settings
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import GradientAverager


@dataclass(frozen=True)
class ComputeSlot:
    """A module with gradients and activations of its own."""

    flat_model: FlatModel
    objective: Objective
    """What computes the loss of the flat model's module."""
    averager: GradientAverager | None = None
    """Averages the gradient of every update over ranks; None: it is the instance's own."""
    stream: torch.cuda.Stream | None = None
    """Stream on which the slot computes; None: the device's present one."""

    @property
    def is_shared(self) -> bool:
        """Whether several ranks compute every update together."""
        return self.averager is not None or len(self.flat_model.shards.ranks) > 1


def new_slot(
    objective: Objective, module: nn.Module, device: torch.device, settings: Settings, changing: Sequence[str] = ()
) -> ComputeSlot:
    """Return a compute slot around `module`, of which training changes these buffers.

    The module is moved to `device`, unless ranks hold it together there.
    """
    kind: type[FlatModel] = FlatModel
    if settings.pool.ranks_per_worker > 1:
        from adloco_dist.pool.sharding import ShardedFlatModel  # with fully_shard, whose import takes half a second

        kind = ShardedFlatModel
    flat_model = kind(module, device, settings.precision, changing, settings.cluster.timeout_seconds)
    return ComputeSlot(flat_model, objective)


def further_slot(first: ComputeSlot, settings: Settings) -> ComputeSlot:
    """Return a slot beside `first`, with a copy of its module, but for frozen parameters; on a GPU with a stream."""
    device, module = first.flat_model.device, first.flat_model.module
    shared = {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    flat_model = FlatModel(copy.deepcopy(module, shared), device, settings.precision, first.flat_model.changing)
    flat_model.point_at(first.flat_model.weights)  # the copy's own parameters are not needed
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return replace(first, flat_model=flat_model, stream=stream)
