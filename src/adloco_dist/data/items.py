"""A user's own items: batches of them, and digests that tell them apart."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from adloco_dist.data.protocols import Batch

Collate = Callable[[list[Any]], Any]
"""Makes the argument of the loss from a list of items."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ItemBatch(Batch):
    """Items of a user's data set, which are collated when the loss needs them. They are split before, because what
    `collate` returns is unknown (it may pad)."""

    items: Sequence[Any]
    collate: Collate = default_collate
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def collated(self) -> Any:
        """The argument of the loss, with its tensors on `device`."""
        return moved(self.collate(list(self.items)), self.device)

    def part(self, start: int, end: int) -> "ItemBatch":
        return replace(self, items=self.items[start:end])

    def to(self, device: torch.device) -> "ItemBatch":
        """The same items, which are collated on the CPU and then moved to `device`."""
        return self if device == self.device else replace(self, device=device)


def moved(value: Any, device: torch.device) -> Any:
    """`value` with all tensors in nested containers on `device`; a GPU receives them through pinned memory."""
    if isinstance(value, torch.Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            return value.pin_memory().to(device, non_blocking=True)
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if callable(getattr(value, "to", None)):  # as transformers' BatchEncoding and torch's PackedSequence have it
        return value.to(device)
    return {key: moved(item, device) for key, item in value.items()} if isinstance(value, Mapping) else value


def item_digest(value: Any) -> str:
    """A digest of nested containers of tensors, arrays and plain values; of other objects, of their types alone."""
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(f"{len(part)}:".encode())
        digest.update(part)
    return digest.hexdigest()


def joined_digest(*parts: object) -> str:
    """sha256 over the texts of `parts`, one after the other."""
    return hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()


def _parts(value: Any) -> list[bytes]:
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        return [f"{array.dtype}{tuple(array.shape)}".encode(), array.flatten().view(torch.uint8).numpy().tobytes()]
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return [f"{value.dtype}{value.shape}".encode(), value.tobytes()]
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, str | int | float | bool | None):
        return [repr(value).encode(errors="replace")]
    if is_dataclass(value):
        return [type(value).__qualname__.encode(), *_parts(vars(value))]
    if isinstance(value, dict):
        return [b"dict", *(part for pair in value.items() for part in _parts(list(pair)))]
    if isinstance(value, list | tuple):
        return [f"{len(value)} items".encode(), *(part for item in value for part in _parts(item))]
    return [type(value).__qualname__.encode()]
