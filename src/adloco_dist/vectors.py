"""Named tensors as one flat vector, so that a collective, a checksum or an optimizer sees one tensor, not hundreds.

Of tensors that are sharded over ranks (DTensors), a rank's vectors hold its own parts.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:  # their import takes half a second
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

ALIGNMENT = 32
"""Elements that every tensor's offset is a multiple of (128 bytes in fp32), so that views suit vector units."""


@dataclass(frozen=True)
class VectorLayout:
    """Where named tensors lie in a flat vector: one after the other, each at an aligned offset.

    Whoever makes a vector fills the gaps between the tensors with zeros, which every elementwise optimizer keeps.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    num_elements: int
    """Length of the vector, a multiple of ALIGNMENT."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> "VectorLayout":
        """The layout of tensors with their names, in the given order."""
        names, shapes, offsets, end = [], [], [], 0
        for name, tensor in tensors:
            names.append(name)
            shapes.append(tensor.shape)
            offsets.append(end)
            end += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(names), tuple(shapes), tuple(offsets), end)

    def boundary(self, count: int) -> int:
        """The offset at which the first `count` tensors end."""
        return (*self.offsets, self.num_elements)[count]

    def view(self, vectors: torch.Tensor, index: int, start: int = 0) -> torch.Tensor:
        """The tensor of that index in flat vectors, (..., num_elements or more), less the first `start`."""
        offset, shape = self.offsets[index] - start, self.shapes[index]
        return vectors[..., offset : offset + shape.numel()].view((*vectors.shape[:-1], *shape))

    def views(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in flat vectors, by name; as `view`."""
        return {name: self.view(vectors, index) for index, name in enumerate(self.names)}

    def gaps(self, vector: torch.Tensor, which: Sequence[int]) -> list[torch.Tensor]:
        """What lies behind the tensors of these indices, which are neighbours, in a part of a vector that has them."""
        start = self.offsets[which[0]]
        bounds = [(self.offsets[i] + self.shapes[i].numel() - start, self.boundary(i + 1) - start) for i in which]
        return [vector[end:following] for end, following in bounds if end < following]


@dataclass(frozen=True)
class Deal:
    """How ranks deal a tensor out among themselves: each has an equal part of one dimension."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dimension: int
    size: int
    """Number of ranks."""

    @classmethod
    def of(cls, shape: Sequence[int], size: int) -> "Deal | None":
        """The deal along the first dimension that can be divided evenly; None: there is none."""
        dimension = next((number for number, length in enumerate(shape) if length % size == 0), None)
        return None if dimension is None else cls(tuple(shape), dimension, size)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of every rank's part."""
        lengths = list(self.shape)
        lengths[self.dimension] //= self.size
        return tuple(lengths)

    def region(self, index: int) -> tuple[slice, ...]:
        """Where in the whole tensor the part of the rank at `index` lies."""
        length = self.part_shape[self.dimension]
        whole = [slice(0, size) for size in self.shape]
        whole[self.dimension] = slice(index * length, (index + 1) * length)
        return tuple(whole)

    @property
    def num_rows(self) -> int:
        """Rows into which whole tensor and parts are cut: a row of the whole has a row of each part, side by side."""
        return math.prod(self.shape[: self.dimension])


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks have parts of it."""
    return hasattr(tensor, "to_local")  # as DTensors alone have it


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, or all of one that is whole; detached, in the memory that it has."""
    detached = tensor.detach()
    return cast("DTensor", detached).to_local() if is_sharded(tensor) else detached


def sharded_modules(module: nn.Module) -> "list[FSDPModule]":
    """The modules to which fully_shard was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # it has been imported if fully_shard was applied
    if fsdp is None:
        return []
    modules: list[Any] = [inner for inner in module.modules() if isinstance(inner, fsdp.FSDPModule)]
    return modules


def shape_in_words(tensor: torch.Tensor) -> str:
    """Return shape and type as in "[2, 3] torch.float32"."""
    return f"{list(tensor.shape)} {tensor.dtype}"
