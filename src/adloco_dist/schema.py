"""What training keeps: each class declares its vectors and scalars once, and whoever stores or counts them reads that.

A checkpoint, `state_dict`, a resume on other ranks and the estimate of memory all follow from the entries of a class,
so that a further vector is one further entry.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch


class Kind(Enum):
    """What an entry holds, where S >= 1 ranks hold the model of a worker together and each has a part of every tensor.

    Vectors are flat, (num_elements,) at the most, and hold this rank's parts of tensors one after the other.
    """

    vector = "vector"
    """All tensors of the model, in the order of its layout; then the buffers that training changes."""
    packed = "packed"
    """All tensors of the model, one fragment after the other; as long as a vector."""
    part = "part"
    """Some tensors of the model (`Entry.tensors`)."""
    fragment = "fragment"
    """The tensors of one fragment, in room for the largest; the number of the fragment is the entry AWAITS."""
    equal = "equal"
    """Of any shape, the same on all ranks of the worker."""
    summed = "summed"
    """Of any shape; what the ranks of the worker hold adds up."""


AWAITS = "awaits"
"""Name of the scalar, of kind `equal`, that says which fragment is in entries of kind `fragment`."""
NOTHING = -1
"""Its value where there is no fragment in them."""


@dataclass(frozen=True)
class Entry:
    """A tensor, or a number, that is an attribute of its owner."""

    name: str
    kind: Kind
    tensors: tuple[int, ...] = ()
    """Of kind `part`: indices of its tensors in the layout of the whole model."""
    is_shared: bool = False
    """Whether all workers that average with each other have the same."""
    is_progress: bool = False
    """Whether it matters only while the worker does not stand at its anchor."""


def gather(owner: object, entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
    """The entries of their owner by name: its very tensors; numbers as scalars on the CPU."""
    values = {entry.name: getattr(owner, entry.name) for entry in entries}
    return {name: value if torch.is_tensor(value) else torch.tensor(value) for name, value in values.items()}


def assign(owner: object, entries: Iterable[Entry], saved: Mapping[str, torch.Tensor]) -> None:
    """Give the owner what was gathered: tensors are copied into its own, numbers keep their type.

    A KeyError says that an entry is missing.
    """
    for entry in entries:
        present, value = getattr(owner, entry.name), saved[entry.name]
        if torch.is_tensor(present):
            present.copy_(value)
        else:
            setattr(owner, entry.name, type(present)(value.item()))
