"""How sums of pseudo-gradients travel between ranks. A new way is one further file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from adloco_dist.averaging.group import Group, ring_bytes_sent

Commit = Callable[[], torch.Tensor]
"""What makes an exchange count: it replaces the residual, and returns the sum in the payload's memory. It computes on
this rank alone, and is called once or, where the exchange is given up, never."""


class Averager(Protocol):
    """Sums the payloads of a group's ranks; its exact part counts workers, so whoever reads the sum has the mean.

    It keeps nothing between two sums: what compression took away and is owed to the next is the caller's `residual`. A
    dataclass says by its fields what all ranks must agree on.
    """

    @property
    def keeps_residual(self) -> bool:
        """Whether it needs a residual (error feedback)."""
        ...

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        """Exchange what the sum over the ranks of `group` takes; their payloads have one length. Collective; blocks.

        The residual stays as it is until the sum is committed, so that after an error nothing was lost. It may run in a
        thread of its own, and then on a stream of its own, while updates are computed.

        Args:
            payload: (num_elements,), on the group's device: a sum of pseudo-gradients of this rank's workers, and
                what has to arrive exactly. It is overwritten.
            num_exact: elements at the payload's end that are summed as they are, before this returns; may be 0.
            residual: (num_elements - num_exact,), zeros at first; what this rank has not sent of earlier payloads, and
                once this sum is committed, of this one. None where none is kept.

        Returns:
            What commits the sum, which has the payload's shape and type, and the same bits on every rank, since all
            ranks decode what was sent, also their own part of it. Where the exact part ends with zero workers the sum
            is dropped, and what was sent counts as not sent.

        Raises:
            RuntimeError: another rank is late, or gone.
        """
        ...

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        """Bytes that each of these ranks sends for one payload; the most of them, where some send less."""
        ...


@dataclass(frozen=True)
class FullPrecision:
    """Sums payloads as they are, by one all-reduce in their own memory."""

    dtype: torch.dtype = field(default=torch.float32, repr=False)
    """Type of the payloads' elements."""

    @property
    def keeps_residual(self) -> bool:
        return False

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        group.all_reduce(payload)
        return lambda: payload

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        return ring_bytes_sent(num_elements * self.dtype.itemsize, len(ranks))


@dataclass(frozen=True)
class Wire:
    """How averages travel: in how many bits, and when (Streaming DiLoCo, 2501.18512).

    As it stands, the whole model is averaged in full precision at the end of a round, and workers wait for it: plain
    DiLoCo.
    """

    averager: Averager | None = None
    """None: in full precision."""
    fragments: int = 1
    """P: parts of the model that are averaged at different times of a round."""
    delay_updates: int = 0
    """tau: updates that are taken while an average travels, before its outer step reaches the worker."""

    @property
    def is_plain(self) -> bool:
        """Whether all workers have the same weights when a round ends."""
        return self.fragments == 1 and self.delay_updates == 0


def is_counted(exact: torch.Tensor) -> bool:
    """Whether a sum is of any worker, by its exact part, (num_exact,); one without such a part is."""
    return not len(exact) or bool(exact[-1])
