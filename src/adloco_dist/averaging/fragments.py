"""Parts of a model that are averaged at different times of a round (Streaming DiLoCo, 2501.18512)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from adloco_dist.vectors import VectorLayout


@dataclass(frozen=True)
class Fragment:
    """Some of a model's tensors."""

    tensors: tuple[int, ...]
    """Their indices in the layout of flat vectors, ascending."""
    slices: tuple[slice, ...]
    """Where they lie in a flat vector, ascending; neighbours are one slice."""
    tensor_slices: tuple[slice, ...]
    """Where each of them lies in a flat vector."""

    @property
    def num_elements(self) -> int:
        return sum(one.stop - one.start for one in self.slices)

    def parts(
        self, *vectors: torch.Tensor, packed: torch.Tensor, by_tensor: bool = False
    ) -> Iterator[tuple[torch.Tensor, ...]]:  # fmt: skip
        """The fragment in flat vectors and in `packed`, which has its slices one after the other; slice by slice."""
        start = 0
        for one in self.tensor_slices if by_tensor else self.slices:
            size = one.stop - one.start
            yield *(vector[one] for vector in vectors), packed[start : start + size]
            start += size


def largest(fragments: Sequence[Fragment]) -> int:
    """Elements of the largest fragment."""
    return max(fragment.num_elements for fragment in fragments)


def packed_part(vector: torch.Tensor, fragments: Sequence[Fragment], index: int) -> torch.Tensor:
    """What a vector that holds one fragment after the other has of the fragment of that index."""
    start = sum(fragment.num_elements for fragment in fragments[:index])
    return vector[start : start + fragments[index].num_elements]


def fragments_of(layout: VectorLayout, count: int, whole: VectorLayout | None = None) -> list[Fragment]:
    """Divide a model's tensors into `count` fragments of about as many elements.

    The largest tensor that is left goes to the fragment with the fewest elements; the average of every fragment then
    takes about as long. Ties go to the first, so all ranks come to the same.

    Args:
        whole: the layout of the whole tensors, of which `layout` has a rank's parts; None: it has them whole.

    Raises:
        ValueError: there are fewer tensors; one line.
    """
    num_tensors = len(layout.names)
    if count > num_tensors:
        raise ValueError(f"fragments={count}: must be <= the {num_tensors} tensors that are trained")
    weighed = whole or layout
    sizes = [weighed.boundary(index + 1) - weighed.boundary(index) for index in range(num_tensors)]
    members: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(num_tensors), key=lambda index: -sizes[index]):
        lightest = loads.index(min(loads))
        members[lightest].append(index)
        loads[lightest] += sizes[index]
    return [_fragment(layout, sorted(tensors)) for tensors in members]


def _fragment(layout: VectorLayout, tensors: Sequence[int]) -> Fragment:
    slices: list[slice] = []
    each = tuple(slice(layout.boundary(index), layout.boundary(index + 1)) for index in tensors)
    for one in each:
        is_next = slices and slices[-1].stop == one.start
        slices.append(slice(slices.pop().start, one.stop) if is_next else one)
    return Fragment(tuple(tensors), tuple(slices), each)
