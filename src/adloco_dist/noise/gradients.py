"""Sketches of what every backward pass adds to the gradients of a model in training (for `NoiseScale`)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from adloco_dist.noise.sketch import BUCKETS, Sketch


class GradientProbe(Protocol):
    """Sketches the gradients of a model, from `start` to `stop`; costs nothing otherwise."""

    is_summed_over_ranks: bool
    """Whether a backward pass's sketch belongs to the sequences of all ranks, over which it is to be summed; else it
    belongs to this rank's own."""
    device: torch.device
    dtype: torch.dtype
    """Element type of the sketches."""

    def start(self, *key: int) -> None:
        """Begin at an update whose gradients are zero, with the signs that belong to `key`."""
        ...

    def take(self) -> torch.Tensor | None:
        """The sketch of all gradients since the last call, shape (BUCKETS,); None: no backward pass gave any."""
        ...

    def stop(self) -> None:
        """Remove the hooks."""
        ...


def new_probe(model: nn.Module, rank: int) -> GradientProbe:
    """The probe that suits the model's parameters.

    Args:
        rank: that of this process among those that share the model.

    Raises:
        ValueError: there is nothing to measure, or parameters are distributed in a way that is not supported.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kind = type(model).__name__
    if not trained:
        raise ValueError(f"model={kind}: none of its parameters requires a gradient; unfreeze some")
    devices = {str(parameter.device) for parameter in trained.values()}
    if len(devices) > 1:
        raise ValueError(f"model={kind}: its parameters are on {', '.join(sorted(devices))}; keep them on one device")
    sharded = [name for name, parameter in trained.items() if hasattr(parameter, "to_local")]  # as DTensors have it
    if not sharded:
        return LocalGradients(list(trained.values()))
    if len(sharded) < len(trained):
        local = next(name for name in trained if name not in sharded)
        rule = f"{sharded[0]} is sharded and {local} is not; shard all parameters with fully_shard"
        raise ValueError(f"model={kind}: {rule}")
    from adloco_dist.noise.sharded import sharded_probe  # with fully_shard, whose import takes half as long as torch's

    return sharded_probe(model, trained, rank)


class LocalGradients:
    """Sees every gradient as it arrives at a plain parameter: before it is accumulated, averaged or clipped.

    DistributedDataParallel averages what was accumulated, after that; so a sketch is of this rank's sequences alone,
    whether or not the backward pass communicates.
    """

    is_summed_over_ranks = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self._first_elements = list(accumulate(sizes, initial=0))[:-1]
        self.device, self.dtype = parameters[0].device, sketch_dtype(parameters)
        self._sketch = Sketch(sum(sizes), self.dtype, self.device)
        self._sum = torch.zeros(BUCKETS, dtype=self.dtype, device=self.device)
        self._has_gradient = False
        self._handles: list[RemovableHandle] = []

    def start(self, *key: int) -> None:
        self._sketch.renew(*key)
        self.take()
        for parameter, first_element in zip(self._parameters, self._first_elements, strict=True):

            def add(gradient: torch.Tensor, first_element: int = first_element) -> None:
                vector = gradient.detach().to(self._sum).reshape(-1)
                self._sum += self._sketch(vector, first_element)
                self._has_gradient = True

            self._handles.append(parameter.register_hook(add))

    def take(self) -> torch.Tensor | None:
        taken = self._sum if self._has_gradient else None
        self._sum, self._has_gradient = torch.zeros_like(self._sum), False
        return taken

    def stop(self) -> None:
        remove(self._handles)


def sketch_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The element type of sketches, fp32 or fp64: gradients of fewer bits are converted one by one."""
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if is_double else torch.float32


def remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()
