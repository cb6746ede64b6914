"""Digests of a user's items."""

import hashlib
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch


def item_digest(value: Any) -> str:
    """A digest of nested containers of tensors, arrays and plain values; of other objects, of their types alone."""
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(f"{len(part)}:".encode())
        digest.update(part)
    return digest.hexdigest()


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
        return [f"{len(value)} items".encode(), *(part for one in value for part in _parts(one))]
    return [type(value).__qualname__.encode()]
