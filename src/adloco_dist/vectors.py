"""Named tensors as one flat vector, so that a collective, a checksum or an optimizer sees one tensor, not hundreds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

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


def embeddings_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
    """The indices of those parameters that are weights of embeddings."""
    weights = {id(inner.weight) for inner in module.modules() if isinstance(inner, nn.Embedding | nn.EmbeddingBag)}
    return frozenset(index for index, parameter in enumerate(parameters) if id(parameter) in weights)


def shape_in_words(tensor: torch.Tensor) -> str:
    """Return shape and type as in "[2, 3] torch.float32"."""
    return f"{list(tensor.shape)} {tensor.dtype}"
