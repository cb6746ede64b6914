"""What one model instance computes on during its turn; as many instances as there are lanes can have theirs at once."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from adloco_dist.config import Settings
from adloco_dist.losses import Losses, compiled_losses, fused_losses, losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.sketch import Sketch
from adloco_dist.terminal import first_line


@dataclass(frozen=True)
class Lane:
    """A module with gradients and activations of its own."""

    flat_model: FlatModel
    module: nn.Module
    """What computes the logits: the flat model's module, or DistributedDataParallel around it."""
    losses: Losses
    """Of the module and a batch; compiled with it (model.compile), or by themselves (model.fuse_loss)."""
    losses_in_words: str
    """How they are computed."""
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
    return Lane(flat_model, flat_model.module, *_choose_losses(settings, device), sketch)


def further_lane(first: Lane, settings: Settings) -> Lane:
    """A lane beside `first`, with a copy of its module, but for frozen parameters; on a GPU with its own stream."""
    device, module = first.flat_model.device, first.flat_model.module
    shared = {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    flat_model = FlatModel(copy.deepcopy(module, shared), device, settings.precision, first.flat_model.changing)
    flat_model.point_at(first.flat_model.weights)  # the copy's own parameters are not needed
    sketch = Sketch(flat_model.num_elements, flat_model.dtype, device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return replace(first, flat_model=flat_model, module=flat_model.module, sketch=sketch, stream=stream)


def _choose_losses(settings: Settings, device: torch.device) -> tuple[Losses, str]:
    if settings.model.compile:
        return compiled_losses(), "loss compiled with the model"
    if device.type != "cuda" or not settings.model.fuse_loss:
        return losses, "loss not fused"
    try:
        return fused_losses(device), "loss fused"
    except Exception as error:  # of any kind: without a compiler or Triton training goes on, only slower
        return losses, f"loss not fused, for torch cannot compile here ({first_line(error)})"
