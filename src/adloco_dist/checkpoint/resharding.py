"""The state of a worker that ranks hold together, read from the files of as many ranks as held it before.

Every rank takes what it needs of one file after the other: nobody has more at one time than its own part and one of
those before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.fragments import fragments_of
from adloco_dist.deal import Deal
from adloco_dist.pool.worker import NOTHING
from adloco_dist.run.manifest import DamagedError
from adloco_dist.vectors import VectorLayout

SUMS = frozenset({"loss_sum", "num_targets", "sketches", "chunk_targets"})
"""What ranks have parts of that add up: the first takes the sum, the others nothing."""
PACKED = frozenset({"residual"})
"""Vectors that have one fragment after the other."""
EQUAL = "norms"
"""A vector that is the same on all ranks of a worker."""
OF_FRAGMENT = "departed"
"""A vector of the fragment that the worker awaits."""


@dataclass(frozen=True)
class Resharding:
    """From the parts of `was` ranks to that of the one at `index` of `now`."""

    whole: VectorLayout
    """Of the trained parameters, whole."""
    num_fragments: int
    was: int
    now: int
    index: int

    def collect(self, file: str, parts: Iterator[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """This rank's tensors, by name.

        Args:
            file: what they are called in an error.
            parts: the tensors of each rank before, in their order.

        Raises:
            DamagedError: they are not of this model.
        """
        found: dict[str, torch.Tensor] = {}
        for place, part in enumerate(parts):
            awaits = int(part.get("awaits", NOTHING))
            for name, value in part.items():
                if name in SUMS:
                    found[name] = found.get(name, torch.zeros_like(value)) + (value if self.index == 0 else 0)
                elif not value.ndim or name == EQUAL:
                    found[name] = value
                else:
                    self._take(file, found, name, value, place, self._tensors(name, awaits))
        return found

    def _take(
        self, file: str, found: dict[str, torch.Tensor], name: str, value: torch.Tensor, place: int,
        tensors: Sequence[int],
    ) -> None:  # fmt: skip
        """Take what this rank needs of a vector of the rank that was at `place`."""
        was, now = self._layout(tensors, self.was), self._layout(tensors, self.now)
        length = self._largest(self.now) if name == OF_FRAGMENT else now.num_elements
        target = found.setdefault(name, value.new_zeros(length))
        if len(value) < was.num_elements:
            raise DamagedError(f"{file}: {name} has {len(value)} elements, the model {was.num_elements}")
        for number, index in enumerate(tensors):
            self._copy(self.whole.shapes[index], place, was.view(value, number), now.view(target, number))

    def _tensors(self, name: str, awaits: int) -> Sequence[int]:
        """The parameters that a vector has, in its order."""
        fragments = fragments_of(self.whole, self.num_fragments)
        if name == OF_FRAGMENT:
            return () if awaits == NOTHING else fragments[awaits].tensors
        if name in PACKED:
            return [index for fragment in fragments for index in fragment.tensors]
        num_tensors, num_decayed = len(self.whole.shapes), sum(len(shape) >= 2 for shape in self.whole.shapes)
        number, is_moment, _ = name.partition(".")
        if not is_moment:
            return range(num_tensors)
        # As optimizers number them: what is decayed, then what is not, as far as there is any.
        groups = [group for group in (range(num_decayed), range(num_decayed, num_tensors)) if group]
        if number not in map(str, range(len(groups))):
            raise DamagedError(f"{name}: is of no part of the model")
        return groups[int(number)]

    def _largest(self, size: int) -> int:
        """Elements of a rank's part of the largest fragment."""
        fragments = fragments_of(self.whole, self.num_fragments)
        return max(self._layout(fragment.tensors, size).num_elements for fragment in fragments)

    def _layout(self, tensors: Sequence[int], size: int) -> VectorLayout:
        """Where a rank of `size` has its parts of these parameters, one after the other."""
        shapes = {self.whole.names[index]: self.whole.shapes[index] for index in tensors}
        parts = {name: torch.empty(_deal(shape, size).part_shape, device="meta") for name, shape in shapes.items()}
        return VectorLayout.of(parts.items())

    def _copy(self, shape: Sequence[int], place: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what the part of the rank at `place` has in common with this rank's."""
        was, now = _deal(shape, self.was).region(place), _deal(shape, self.now).region(self.index)
        common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(was, now, strict=True)]
        if all(one.start < one.stop for one in common):
            target[_within(common, now)] = source[_within(common, was)]


def _deal(shape: Sequence[int], size: int) -> Deal:
    deal = Deal.of(shape, size)
    if deal is None:
        raise DamagedError(f"has a parameter {list(shape)} that {size} ranks cannot have shared")
    return deal


def _within(region: Sequence[slice], part: Sequence[slice]) -> tuple[slice, ...]:
    """A region of a whole tensor, as indices into a part of it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, part, strict=True))
