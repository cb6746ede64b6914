"""A module on which model instances take turns.

Weights of an instance are one flat vector; the module's parameters are views into the vector it was last pointed
at. Gradients and activations therefore exist once per module, whatever the number of instances, and everything that
treats parameters alike (optimizers, clipping, averaging, checksums) sees one tensor instead of hundreds.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from adloco_dist.config import Precision

ALIGNMENT = 32
"""Elements that every parameter's offset is a multiple of (128 bytes in fp32), so that views suit vector units."""


def vector_dtype(precision: Precision) -> torch.dtype:
    """Of the elements of flat vectors: bf16 computes in bf16, and keeps its weights in fp32."""
    return torch.float64 if precision is Precision.fp64 else torch.float32


def computes_in_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether passes on this device run under bf16 autocast."""
    return precision is Precision.bf16 or (precision is Precision.auto and has_bf16(device))


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16 (Ampere and later, MI200 and later) rather than emulates it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


class FlatModel:
    """A module whose parameters and gradients are views into flat vectors of `num_elements` elements.

    Parameters with two or more dimensions come first: `weights[:decay_boundary]` is what weight decay applies to.
    The gaps between aligned parameters are zero in every vector and stay zero under every optimizer.

    Attributes:
        payload: num_elements + 1 elements; the last is a count that travels with an averaged vector.
        gradient: `payload` without that count. Free outside the inner phase: the outer step keeps the
            pseudo-gradient in it, an evaluation the weights that are to be evaluated.
        weights: the vector that the module points at.
        capacity: sequences that the device takes in one pass; None: any number. Decides passes, never a batch.
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: Precision) -> None:
        self.dtype = vector_dtype(precision)
        self.device = device
        self.capacity: int | None = None
        self.module = module.to(device=device, dtype=self.dtype).train()
        self._autocast = computes_in_bf16(precision, device)
        named = sorted(module.named_parameters(), key=lambda item: item[1].ndim < 2)  # stable: order is kept
        self._views: list[tuple[str, nn.Parameter, int]] = []
        self.decay_boundary = 0
        end = 0
        for name, parameter in named:
            self._views.append((name, parameter, end))
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if parameter.ndim >= 2:
                self.decay_boundary = end
        self.num_elements = end
        self.num_parameters = sum(parameter.numel() for _, parameter in named)
        self.payload = torch.zeros(self.num_elements + 1, dtype=self.dtype, device=device)
        self.gradient = self.payload[:-1]
        self.weights = self.gradient  # until it is pointed at something
        for parameter, view in self._split(self.gradient):
            parameter.grad = view

    def initial_weights(self) -> torch.Tensor:
        """The module's present parameters as a new flat vector, to which it then points."""
        weights = torch.zeros(self.num_elements, dtype=self.dtype, device=self.device)
        for parameter, view in self._split(weights):
            view.copy_(parameter.data)
        self.point_at(weights)
        return weights

    def point_at(self, weights: torch.Tensor) -> None:
        """Make `weights` the module's parameters; nothing is copied."""
        self.weights = weights
        for parameter, view in self._split(weights):
            parameter.data = view

    @contextmanager
    def borrowed(self, weights: torch.Tensor) -> Iterator[nn.Module]:
        """The module for a forward pass without gradients, on `weights` from any device.

        Weights that live elsewhere are copied over the gradient, which is not in use then.
        """
        self.point_at(weights if weights.device == self.device else self.gradient.copy_(weights))
        self.module.eval()
        with torch.no_grad(), self.autocast():
            yield self.module
        self.module.train()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def named_views(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters that flat vectors hold, by name.

        Args:
            vectors: (..., num_elements); the leading dimensions lead in every view.
        """
        return {
            name: vectors[..., offset : offset + parameter.numel()].view(*vectors.shape[:-1], *parameter.shape)
            for name, parameter, offset in self._views
        }

    def _split(self, vector: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        views = self.named_views(vector)
        for name, parameter, _ in self._views:
            yield parameter, views[name]


def new_outer_vector(like: torch.Tensor, on_cpu: bool) -> torch.Tensor:
    """A copy of `like` for outer state: on its own device, or in CPU memory, pinned where a GPU copies from it."""
    if not on_cpu:
        return like.clone()
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type == "cuda").copy_(like)
