"""What one model instance computes on during its turn; as many instances as there are lanes can have theirs at once."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from adloco_dist.config import Settings
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.sketch import Sketch


@dataclass(frozen=True)
class Lane:
    """A module with gradients and activations of its own."""

    flat_model: FlatModel
    module: nn.Module
    """What computes the logits: the flat model's module, compiled (model.compile), or in DistributedDataParallel."""
    sketch: Sketch
    stream: torch.cuda.Stream | None = None
    """None: the device's present one."""


def new_lane(module: nn.Module, device: torch.device, settings: Settings, changing: Sequence[str] = ()) -> Lane:
    """A lane around `module`, which it moves to `device`.

    Args:
        changing: names of the module's buffers that training changes.
    """
    flat_model = FlatModel(module, device, settings.precision, changing)
    sketch = Sketch(flat_model.num_elements, flat_model.dtype, device)
    computing = torch.compile(flat_model.module) if settings.model.compile else flat_model.module
    return Lane(flat_model, cast(nn.Module, computing), sketch)


def further_lane(first: Lane, settings: Settings) -> Lane:
    """A lane beside `first`, with a copy of its module, but for frozen parameters; on a GPU with its own stream."""
    device, module = first.flat_model.device, first.flat_model.module
    shared = {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    lane = new_lane(copy.deepcopy(module, shared), device, settings, first.flat_model.changing)
    lane.flat_model.point_at(first.flat_model.weights)  # the copy's own parameters are not needed
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return replace(lane, stream=stream)
