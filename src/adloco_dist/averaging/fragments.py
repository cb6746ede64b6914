"""Parts of a model that are averaged at different times of a round (Streaming DiLoCo, 2501.18512)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adloco_dist.vectors import VectorLayout


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of a fragment that are worked through together, while they are in a cache."""

    where: slice
    """In a flat vector."""
    packed: slice
    """In a vector of the fragment alone, which has its elements one after the other."""
    tensors: Sequence[int] = ()
    """Whose elements they are, where runs have whole tensors."""


@dataclass(frozen=True)
class Fragment:
    """Some of a model's tensors."""

    tensors: tuple[int, ...]
    """Their indices in the layout of flat vectors, ascending."""
    slices: tuple[slice, ...]
    """Where they lie in a flat vector, ascending; neighbours are one slice."""
    sizes: tuple[int, ...]
    """Elements that each of them has there, with the gap behind it."""

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    def runs(self, max_elements: int) -> Iterator[Run]:
        """Cut it into runs of at most so many elements, wherever these end."""
        start = 0
        for where in self.slices:
            for first in range(where.start, where.stop, max_elements):
                stop = min(first + max_elements, where.stop)
                yield Run(slice(first, stop), slice(start, start + stop - first))
                start += stop - first

    def tensor_runs(self, layout: VectorLayout, max_elements: int) -> Iterator[Run]:
        """Cut it into runs of whole neighbouring tensors, each of at most so many elements or of one tensor."""
        start, tensors = 0, []
        for index, following in zip(self.tensors, (*self.tensors[1:], None), strict=True):
            tensors.append(index)
            where = slice(layout.offsets[tensors[0]], layout.boundary(index + 1))
            if following == index + 1 and layout.boundary(index + 2) - where.start <= max_elements:
                continue
            stop = start + where.stop - where.start
            yield Run(where, slice(start, stop), tensors)
            start, tensors = stop, []


def largest(fragments: Sequence[Fragment]) -> int:
    """Elements of the largest fragment."""
    return max(fragment.num_elements for fragment in fragments)


def fragments_of(layout: VectorLayout, count: int, whole: VectorLayout | None = None) -> list[Fragment]:
    """Divide a model's tensors into `count` fragments of about as many elements; a ValueError where there are fewer.

    The largest tensor that is left goes to the fragment with the fewest elements; the average of every fragment then
    takes about as long. Ties go to the first, so all ranks come to the same. If `layout` has a rank's parts of tensors,
    `whole` is the layout of the whole tensors.
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
    fragments = []
    for tensors in map(sorted, members):
        bounds = [(layout.boundary(index), layout.boundary(index + 1)) for index in tensors]
        slices: list[slice] = []
        for start, stop in bounds:
            is_next = slices and slices[-1].stop == start
            slices.append(slice(slices.pop().start, stop) if is_next else slice(start, stop))
        fragments.append(Fragment(tuple(tensors), tuple(slices), tuple(stop - start for start, stop in bounds)))
    return fragments
