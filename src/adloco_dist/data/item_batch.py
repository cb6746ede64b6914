"""Batches of a user's own items."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import default_collate

Collate = Callable[[list[Any]], Any]
"""Makes what the loss is given out of a list of items."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ItemBatch:
    """Items of a user's data set, which are collated when the loss asks for them.

    Items are split before they are collated, because nothing is known of what `collate` makes of them (it may pad).
    """

    items: Sequence[Any]
    collate: Collate = default_collate
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def collated(self) -> Any:
        """What the loss is given, with its tensors on `device`."""
        return moved(self.collate(list(self.items)), self.device)

    def split(self, micro_batch_size: int) -> list["ItemBatch"]:
        """Micro-batches of `micro_batch_size` items each; the last may be smaller."""
        starts = range(0, len(self), micro_batch_size)
        return [replace(self, items=self.items[start : start + micro_batch_size]) for start in starts]

    def chunks(self, count: int) -> list["ItemBatch"]:
        """`count` batches whose sizes differ by at most one item, larger ones first."""
        size, num_larger = divmod(len(self), count)
        starts = [number * size + min(number, num_larger) for number in range(count + 1)]
        return [replace(self, items=self.items[start:end]) for start, end in pairwise(starts)]

    def to(self, device: torch.device) -> "ItemBatch":
        """The same items, which will be collated on the CPU and moved to `device`."""
        return self if device == self.device else replace(self, device=device)


def moved(value: Any, device: torch.device) -> Any:
    """`value` with all tensors in nested containers on `device`; a GPU receives them through pinned memory."""
    if isinstance(value, torch.Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            return value.pin_memory().to(device, non_blocking=True)
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(one, device) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(one, device) for one in value)
    if callable(getattr(value, "to", None)):  # as transformers' BatchEncoding and torch's PackedSequence have it
        return value.to(device)
    return {key: moved(one, device) for key, one in value.items()} if isinstance(value, Mapping) else value
