"""How ranks deal a tensor out among themselves: pure arithmetic on shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Deal:
    """A tensor that a number of ranks share: each has an equal part of one dimension."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dimension: int
    size: int
    """Number of ranks."""

    @classmethod
    def of(cls, shape: Sequence[int], size: int) -> "Deal | None":
        """The deal along the first dimension that can be divided evenly; None: there is none."""
        found = next((number for number, length in enumerate(shape) if length % size == 0), None)
        return None if found is None else cls(tuple(shape), found, size)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of every rank's part."""
        lengths = list(self.shape)
        lengths[self.dimension] //= self.size
        return tuple(lengths)

    def region(self, index: int) -> tuple[slice, ...]:
        """Where in the whole tensor the part of the rank at `index` lies."""
        length = self.part_shape[self.dimension]
        whole = [slice(0, one) for one in self.shape]
        whole[self.dimension] = slice(index * length, (index + 1) * length)
        return tuple(whole)

    @property
    def num_rows(self) -> int:
        """Rows into which whole tensor and parts are cut: a row of the whole has a row of each part, side by side."""
        return math.prod(self.shape[: self.dimension])

    @property
    def width(self) -> int:
        """Elements in a row of a part."""
        return math.prod(self.part_shape[self.dimension :])
