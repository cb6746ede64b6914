"""Sketches of what every backward pass adds to the gradients of a model in training (for `NoiseScale`)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from adloco_dist.noise.sketch import BUCKETS, Sketch
from adloco_dist.vectors import local, sharded_modules

if TYPE_CHECKING:  # its import takes half a second
    from torch.distributed.tensor import DTensor


class GradientProbe(ABC):
    """Sketches the gradients of a model, from `start` to `stop`; costs nothing otherwise.

    Attributes:
        is_summed_over_ranks: whether a backward pass's sketch belongs to the sequences of all ranks, over which it is
            to be summed; else it belongs to this rank's own.
        device: device of the sketches.
        dtype: element type of the sketches: fp32 or fp64; gradients of fewer bits are converted one by one.
    """

    is_summed_over_ranks: bool

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
        self.device, self.dtype = device, torch.float64 if is_double else torch.float32
        self._parameters = parameters
        parts = [local(parameter) for parameter in parameters]
        self._first_elements = list(accumulate((part.numel() for part in parts), initial=0))
        self._sketch = Sketch(self._first_elements.pop(), self.dtype, parts[0].device)
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def start(self, *key: int) -> None:
        """Begin at an update whose gradients are zero, with the signs that belong to `key`."""

    @abstractmethod
    def take(self) -> torch.Tensor | None:
        """The sketch of all gradients since the last call, (BUCKETS,); None: no backward pass gave any."""

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


class LocalGradients(GradientProbe):
    """Sees every gradient as it arrives at a plain parameter: before it is accumulated, averaged or clipped.

    DistributedDataParallel averages what was accumulated, after that; so a sketch is of this rank's sequences alone,
    whether or not the backward pass communicates.
    """

    is_summed_over_ranks = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, parameters[0].device)
        self._sum: torch.Tensor | None = None

    def start(self, *key: int) -> None:
        self._sketch.renew(*key)
        self._sum = None
        for parameter, first_element in zip(self._parameters, self._first_elements, strict=True):

            def add(gradient: torch.Tensor, first_element: int = first_element) -> None:
                sketch = self._sketch(gradient.detach().to(self.device, self.dtype).reshape(-1), first_element)
                self._sum = sketch if self._sum is None else self._sum + sketch

            self._handles.append(parameter.register_hook(add))

    def take(self) -> torch.Tensor | None:
        taken, self._sum = self._sum, None
        return taken


class ShardedGradients(GradientProbe):
    """Sees this rank's shards of the gradient that fully_shard has averaged over the ranks.

    What a backward pass adds is the difference of the accumulated gradient's sketches. Every rank signs its shards by
    itself, so that the sum of all ranks' sketches is a sketch of the whole gradient.
    """

    is_summed_over_ranks = True

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], rank: int) -> None:
        """A ValueError of one line says that the parameters are sharded in a way that is not supported."""
        kind, tensors = type(model).__name__, cast("Mapping[str, DTensor]", trained)
        if not sharded_modules(model):
            rule = f"{next(iter(trained))} is a DTensor; of these only fully_shard's are supported"
            raise ValueError(f"model={kind}: {rule}")
        for name, tensor in tensors.items():
            if sum(placement.is_shard() for placement in tensor.placements) > 1:
                rule = f"{name} is sharded over several mesh dimensions; only fully_shard by itself is supported"
                raise ValueError(f"model={kind}: {rule}")
        mesh = next(iter(tensors.values())).device_mesh
        super().__init__(list(trained.values()), torch.device(mesh.device_type))
        self._rank, self._has_gradient = rank, False
        part = local(self._parameters[0])  # in CPU memory where fully_shard offloads
        self._total = torch.zeros(BUCKETS, dtype=self.dtype, device=part.device)

    def start(self, *key: int) -> None:
        self._sketch.renew(*key, self._rank)
        self._total, self._has_gradient = torch.zeros_like(self._total), False

        def note(_: torch.Tensor) -> None:
            self._has_gradient = True

        self._handles += [parameter.register_post_accumulate_grad_hook(note) for parameter in self._parameters]

    def take(self) -> torch.Tensor | None:
        if not self._has_gradient:
            return None
        self._has_gradient = False
        total = torch.zeros_like(self._total)
        for parameter, first_element in zip(self._parameters, self._first_elements, strict=True):
            if parameter.grad is not None and _is_first_replica(parameter):
                total += self._sketch(local(parameter.grad).to(total).reshape(-1), first_element)
        taken, self._total = total - self._total, total
        return taken.to(self.device)


def _is_first_replica(tensor: torch.Tensor) -> bool:
    """Whether this rank's shard counts where several ranks hold the same one."""
    sharded = cast("DTensor", tensor)
    places = zip(sharded.placements, sharded.device_mesh.get_coordinate() or [], strict=True)
    return all(placement.is_shard() or index == 0 for placement, index in places)
