"""Which of a module's buffers are state: those in its state_dict that training changes (docs/state.md)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Buffer:
    """A buffer by its place in a module, whatever tensor is there."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.owner._buffers[self.attribute]

    def put(self, tensor: torch.Tensor | None) -> None:
        self.owner._buffers[self.attribute] = tensor


class Watched:
    """Buffers, each with the tensor that is there now: finds which are replaced or written to afterwards.

    torch counts how often a tensor is written to, except through `.data` and by the kernels of batch normalisation
    (which are known by their counter of batches).
    """

    def __init__(self, buffers: list[Buffer]) -> None:
        self._before = [(buffer, tensor, _version(tensor)) for buffer in buffers for tensor in [buffer.tensor]]

    def touched(self) -> Iterator[Buffer]:
        for buffer, tensor, version in self._before:
            if buffer.tensor is not tensor or _version(tensor) != version:
                yield buffer


def persistent_buffers(module: nn.Module) -> list[Buffer]:
    """The buffers in the module's state_dict. The others are constants, or caches that a forward pass fills itself."""
    return [
        Buffer(f"{path}.{attribute}" if path else attribute, owner, attribute)
        for path, owner in module.named_modules()
        for attribute in owner._buffers
        if attribute not in owner._non_persistent_buffers_set
    ]


class UnsuitableBufferError(ValueError):
    """A flat vector cannot hold a buffer that training changes."""


def changing_buffers(module: nn.Module, dtype: torch.dtype, forward: Callable[[], object]) -> tuple[str, ...]:
    """The names of the persistent buffers that a forward pass in training mode changes; leaves all as they were.

    An UnsuitableBufferError says which of them flat vectors of the type `dtype` cannot hold, and why.
    """
    buffers = persistent_buffers(module)
    before = {buffer: buffer.tensor for buffer in buffers}
    values = {buffer: tensor.clone() for buffer, tensor in before.items() if tensor is not None}
    watched, was_training = Watched(buffers), module.training
    try:
        module.train()
        with torch.no_grad():
            forward()
        touched = set(watched.touched())
        for buffer, value in values.items():
            is_comparable = value.layout == torch.strided  # else it must show in another way that it was touched
            if (present := buffer.tensor) is None or (is_comparable and not torch.equal(present, value)):
                touched.add(buffer)
        for buffer in touched:
            if obstacle := _obstacle(before[buffer], buffer.tensor, dtype):
                raise UnsuitableBufferError(f"{buffer.name} {obstacle}")
    finally:
        module.train(was_training)
        for buffer, tensor in before.items():
            buffer.put(tensor if tensor is None else tensor.copy_(values[buffer]))
    return tuple(buffer.name for buffer in buffers if buffer in touched)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _obstacle(before: torch.Tensor | None, after: torch.Tensor | None, dtype: torch.dtype) -> str | None:
    """Why a flat vector cannot hold a buffer that was one tensor before a forward pass and is another after it."""
    if before is None or after is None:
        return "is there at some times and not at others"
    if before.shape != after.shape or before.device != after.device:
        return f"changes from {list(before.shape)} on {before.device} to {list(after.shape)} on {after.device}"
    if before.dtype != after.dtype:
        return f"changes from {before.dtype} to {after.dtype}"
    if after.layout != torch.strided or after.is_quantized or after.is_complex():
        return "is sparse, quantized or complex"
    if not after.is_floating_point() and not torch.equal(after.to(dtype).to(after.dtype), after):
        return f"holds whole numbers that {dtype} cannot"
    return None
