"""The arithmetic of an outer step, on chunks of flat vectors, which stay in a cache from one operation to the next.

The ranks of a trainer may compute on CPUs and on GPUs, and come to the same bits: operations round alike everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch

CPU_CHUNK_ELEMENTS = 1 << 18
GPU_CHUNK_ELEMENTS = 1 << 22
"""Elements of a chunk. On a CPU each thread's part of it stays in a cache from one operation to the next; on a GPU it
is worth the 5 us that a launch takes, and outer state in CPU memory is copied by chunks."""


@dataclass(frozen=True)
class OuterSGD:
    """The optimizer of the anchor, whose gradient is the mean pseudo-gradient.

    DiLoCo is lr 0.7 with Nesterov momentum 0.9; plain averaging of weights is lr 1 without momentum.
    """

    lr: float = 0.7
    momentum: float = 0.9
    follows_workers: bool = False
    """Whether the rate is that of two workers; of more it is that times the cube root of half their number
    (docs/theory.md)."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and isfinite(self.lr)):
            raise ValueError(f"lr={self.lr}: must be > 0 and finite")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: must be in [0, 1)")

    def rate(self, num_workers: float) -> float:
        """The rate for the mean of so many workers; in three digits, as powers are not the same bits everywhere."""
        return self.lr * round(max(1.0, num_workers / 2) ** (1 / 3), 3) if self.follows_workers else self.lr

    def step(
        self, anchor: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, num_workers: float = 1.0
    ) -> None:
        """Take a step of torch.optim.SGD (Nesterov) in place, in operations that round alike on every device.

        One operation that multiplies and adds (torch's fused SGD, `add_` with an alpha) rounds twice on a CPU and once
        on a GPU.

        Args:
            anchor, gradient: (n,) each, on one device.
            momentum: (n,), zeros before the first step; None where the optimizer has none.
            num_workers: those whose mean the gradient is.
        """
        rate = self.rate(num_workers)
        if momentum is None:
            update = gradient * rate
        else:
            momentum.mul_(self.momentum).add_(gradient)
            update = (momentum * self.momentum).add_(gradient).mul_(rate)
        anchor.sub_(update)


def chunk_elements(device: torch.device) -> int:
    """Elements of flat vectors that are worked through at one time on `device`."""
    return CPU_CHUNK_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else GPU_CHUNK_ELEMENTS


def chunks(num_elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of a vector, each of which is worked through at one time on `device`."""
    size = chunk_elements(device)
    for start in range(0, num_elements, size):
        yield slice(start, min(start + size, num_elements))


def add_difference(
    anchor: torch.Tensor, weights: torch.Tensor, total: torch.Tensor, is_first: bool = True, scale: float = 1.0
) -> None:
    """Add x - w, times `scale`, to `total`, where x is the anchor and w a worker's weights; or let it begin with that.

    Args:
        anchor: of any shape, in the type and on the device of `total`, which is that which computes.
        weights: of that shape, in any floating-point type, on any device.
    """
    # A worker of lower precision started from the rounded anchor: what rounding took away is no progress of it, and
    # stays in the anchor.
    start = anchor if weights.dtype == anchor.dtype else anchor.to(weights.dtype).to(anchor.dtype)
    # Differences first: x - w is small beside x, and a sum of weights would round it away.
    weights = weights.to(total.device, non_blocking=True)
    difference = torch.sub(start, weights, out=total) if is_first else start - weights
    if scale != 1.0:
        difference.mul_(scale)
    if not is_first:
        total.add_(difference)


def step_anchor(
    optimizer: OuterSGD, anchor: torch.Tensor, momentum: torch.Tensor | None, total: torch.Tensor, num_workers: float
) -> torch.Tensor:
    """Make the summed pseudo-gradients their mean, take the optimizer's step with it, in place, and return the new
    anchor on the device, (n,).

    Args:
        anchor, momentum: (n,) each; on the device, or in CPU memory, pinned: then they are copied to the device and
            back in the order of its work, without waiting for it.
        total: (n,), on the device that computes; the mean afterwards.
        num_workers: those in the sum, or the sum of their weights; 0: the anchor stays.
    """
    state = [anchor] if momentum is None else [anchor, momentum]
    near = [vector.to(total.device, non_blocking=True) for vector in state]
    if num_workers:
        # Times the reciprocal: a GPU divides by a number of the host in that way, a CPU does not.
        optimizer.step(near[0], near[1] if momentum is not None else None, total.mul_(1 / num_workers), num_workers)
        if anchor.device != total.device:
            for home, new in zip(state, near, strict=True):
                home.copy_(new, non_blocking=True)
    return near[0]


def rejoin(weights: torch.Tensor, departed: torch.Tensor, anchor: torch.Tensor) -> None:
    """Bring a step to a worker that has taken updates since its weights were sent off: w <- x + (w - departed).

    What it has learned since then is kept; it travels with the next pseudo-gradient. `departed` is zeros afterwards.
    """
    weights.sub_(departed.sub_(anchor.to(departed)).to(weights))
    departed.zero_()
