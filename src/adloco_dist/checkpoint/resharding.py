"""The state of a worker that ranks hold together, read from the files of as many ranks as held it before.

A rank takes its part of one parameter after the other, from files that are mapped: it never has a whole vector.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from adloco_dist.averaging.fragments import Fragment, fragments_of
from adloco_dist.run.manifest import DamagedError
from adloco_dist.schema import AWAITS, NOTHING, Entry, Kind
from adloco_dist.vectors import Deal, VectorLayout


@dataclass(frozen=True)
class Resharding:
    """From the parts of `size_before` ranks to that of the one at `index` of `size`."""

    whole: VectorLayout
    """Of the trained parameters, whole."""
    num_fragments: int
    size_before: int
    size: int
    index: int

    def collect(
        self, file: str, entries: Iterable[Entry], parts: Sequence[Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """This rank's tensors, by name.

        Args:
            file: what they are called in an error.
            parts: the tensors of each rank before, in their order.

        Raises:
            DamagedError: they are not of this model.
        """
        collected: dict[str, torch.Tensor] = {}
        for entry in entries:
            values = [part[entry.name] for part in parts]
            if entry.kind is Kind.equal:
                collected[entry.name] = values[0]
            elif entry.kind is Kind.summed:  # the first takes the sum, the others nothing
                collected[entry.name] = sum(values[1:], values[0]) if self.index == 0 else torch.zeros_like(values[0])
            else:
                tensors = self._tensors(entry, int(parts[0].get(AWAITS, NOTHING)))
                before = self._layout(tensors, self.size_before)
                for value in values:
                    if len(value) < before.num_elements:
                        short = f"{entry.name} has {len(value)} elements, the model {before.num_elements}"
                        raise DamagedError(f"{file}: {short}")
                collected[entry.name] = self._part(entry, tensors, before, values)
        return collected

    def _part(
        self, entry: Entry, tensors: Sequence[int], before: VectorLayout, values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """This rank's part of a vector whose parts were `values`."""
        now = self._layout(tensors, self.size)
        length = now.num_elements
        if entry.kind is Kind.fragment:  # room for the largest
            length = max(self._layout(fragment.tensors, self.size).num_elements for fragment in self._fragments)
        part = values[0].new_zeros(length)
        for number, index in enumerate(tensors):
            shape = self.whole.shapes[index]
            whole, deal_before = values[0].new_empty(shape), _deal(shape, self.size_before)
            for place, value in enumerate(values):
                whole[deal_before.region(place)] = before.view(value, number)
            now.view(part, number).copy_(whole[_deal(shape, self.size).region(self.index)])
        return part

    def _tensors(self, entry: Entry, awaits: int) -> Sequence[int]:
        """The parameters that a vector has, in its order."""
        match entry.kind:
            case Kind.part:
                return entry.tensors
            case Kind.packed:
                return [index for fragment in self._fragments for index in fragment.tensors]
            case Kind.fragment:
                return () if awaits == NOTHING else self._fragments[awaits].tensors
            case _:
                return range(len(self.whole.shapes))

    @property
    def _fragments(self) -> list[Fragment]:
        return fragments_of(self.whole, self.num_fragments)

    def _layout(self, tensors: Sequence[int], size: int) -> VectorLayout:
        """Where a rank of `size` has its parts of these parameters, one after the other."""
        shapes = {self.whole.names[index]: self.whole.shapes[index] for index in tensors}
        parts = {name: torch.empty(_deal(shape, size).part_shape, device="meta") for name, shape in shapes.items()}
        return VectorLayout.of(parts.items())


def _deal(shape: Sequence[int], size: int) -> Deal:
    deal = Deal.of(shape, size)
    if deal is None:
        raise DamagedError(f"has a parameter {list(shape)} that {size} ranks cannot have shared")
    return deal
