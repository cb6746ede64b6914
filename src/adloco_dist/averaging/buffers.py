"""Persistent buffers of anybody's module: those that training changes are averaged, the others are constants.

The rule is that of docs/state.md. Which ones training changes is found at the first outer step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from adloco_dist.averaging.group import Group
from adloco_dist.averaging.replica import Replica
from adloco_dist.buffers import persistent_buffers
from adloco_dist.vectors import shape_in_words


class AveragedBuffers:
    """A module's persistent buffers, and copies of what they were at the last outer step.

    Attributes:
        values: those copies, by name.
        changing: names of the buffers that training changes; None: no outer step has been taken.
        dtype: of the vectors in which they travel: fp64 holds whole numbers up to 2^53.
    """

    dtype = torch.float64

    def __init__(self, module: nn.Module) -> None:
        """Raises a ValueError of one line where a buffer is not dense."""
        self._buffers = {buffer.name: buffer for buffer in persistent_buffers(module) if buffer.tensor is not None}
        self.values: dict[str, torch.Tensor] = {}
        for name, buffer in self._buffers.items():
            if buffer.tensor is None or buffer.tensor.layout != torch.strided or buffer.tensor.is_quantized:
                raise ValueError(f"model: its buffer {name} is not dense; if it is a cache, use persistent=False")
            self.values[name] = buffer.tensor.detach().clone(memory_format=torch.contiguous_format)
        self.changing: list[str] | None = None
        self._found: list[str] = []

    def facts(self) -> dict[str, str]:
        """What the ranks of a group must agree on, by name."""
        return {f"buffer {name}": shape_in_words(value) for name, value in self.values.items()}

    def broadcast(self, group: Group, device: torch.device) -> None:
        """Give all buffers the lowest rank's bits. Collective."""
        if not self.values:
            return
        contents = [_content(value) for value in self.values.values()]
        everything = torch.cat([content.to(device) for content in contents])
        group.broadcast(everything)
        for content, received in zip(contents, everything.split([len(one) for one in contents]), strict=True):
            content.copy_(received)
        self._put(self.values)

    def find_changing(self, group: Group | None) -> None:
        """Find which buffers training changes, on any rank, and afterwards that it changes no others.

        Collective until an outer step was taken, which makes it known.

        Raises:
            ValueError: a constant has changed, or a buffer cannot be averaged; one line.
        """
        changed = [not torch.equal(_content(self._present(name)), _content(self.values[name])) for name in self.values]
        self._found = self.changing or []
        if self.changing is None:
            tables = [changed] if group is None or not changed else group.exchange(changed)
            self._found = [name for name, *by_rank in zip(self.values, *tables, strict=True) if any(by_rank)]
        for name, has_changed in zip(self.values, changed, strict=True):
            if has_changed and name not in self._found:
                remedy = "a cache is registered with persistent=False"
                raise ValueError(f"model: its buffer {name} has changed, but did not in the first round; {remedy}")
            if has_changed and self.values[name].is_complex():
                raise ValueError(f"model: its buffer {name} changes and is complex, which is not supported")

    @property
    def num_elements(self) -> int:
        return sum(self.values[name].numel() for name in self._found)

    def sum_of(self, replicas: Sequence[Replica], total: torch.Tensor) -> None:
        start = 0
        for name in self._found:
            value = self._present(name).reshape(-1)
            total[start : start + len(value)] = value
            start += len(value)
        total.mul_(sum(replica.weight for replica in replicas))

    def step(self, total: torch.Tensor, num_workers: float) -> None:
        """Make the mean of the workers' values those of this outer step; of whole numbers it is rounded."""
        self.changing = self._found
        if not num_workers:
            return
        values = [self.values[name] for name in self.changing]
        means = total.mul_(1 / num_workers).split([value.numel() for value in values])
        for value, mean in zip(values, means, strict=True):
            value.copy_((mean if value.is_floating_point() else mean.round()).view(value.shape))

    def restart(self, replicas: Sequence[Replica]) -> None:
        """Put the changing buffers' values of the last outer step into the module, if there is a replica."""
        self._put((self.changing or ()) if replicas else ())

    def recover(self) -> None:
        """Put the values of the last outer step into all buffers: it may not be known yet which of them change."""
        self._put(self.values)

    @contextmanager
    def outer_values(self) -> Iterator[None]:
        """Have the values of the last outer step in the module while the block runs."""
        own = {name: self._present(name).clone() for name in self.changing or ()}
        self._put(self.changing or ())
        try:
            yield
        finally:
            for name, value in own.items():
                self._present(name).copy_(value)

    def _put(self, names: Iterable[str]) -> None:
        for name in names:
            self._present(name).copy_(self.values[name])

    def _present(self, name: str) -> torch.Tensor:
        present, shape = self._buffers[name].tensor, shape_in_words(self.values[name])
        if present is None or present.layout != torch.strided or shape_in_words(present) != shape:
            rule = "a buffer keeps its shape and type, unless it is registered with persistent=False"
            raise ValueError(f"model: its buffer {name} is no dense {shape} any more; {rule}")
        return present.detach()


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, (bytes,); of a contiguous one they are its own memory."""
    return tensor.reshape(-1).view(torch.uint8)
