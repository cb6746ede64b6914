"""The outer step of DiLoCo (2311.08105, Algorithm 1, lines 12 to 14), as actions on flat vectors.

1. `pseudo_gradient`: the sum of x - w over this rank's workers, where x is the anchor and w a worker's weights
2. `Averager.all_reduce`: that sum, and the number of workers in it, travel, in a `Background` while updates go on
3. `outer_step`: the mean becomes the gradient of a step on the anchor, which every rank takes alike
4. `restart`: workers take the new anchor; or, where it comes late, `rejoin`: they keep what they learned meanwhile

All but the averager's take a chunk of the vectors at a time, so that no second vector of the model's size is
needed, and what one action leaves in a cache the next finds there.
"""

from collections.abc import Iterable, Iterator, Sequence
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
    nesterov: bool = True
    clip_norm: float | None = None
    """Maximum norm of a worker's pseudo-gradient, of each fragment; a larger one is scaled down to it. None: any."""
    radial: bool = False
    """Whether the mean of a tensor has the mean of the workers' norms (`averaging.radial`); embeddings have a plain
    mean."""
    outlier_deviations: float | None = None
    """A worker is left out of an average if the norm of its pseudo-gradient is above the mean of its earlier ones by
    more than so many standard deviations (`averaging.outliers`). None: whatever its norm."""
    outlier_rounds: int = 20
    """Norms of a worker that must have been seen before it may be left out."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and isfinite(self.lr)):
            raise ValueError(f"lr={self.lr}: must be > 0 and finite")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: must be in [0, 1)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: must be > 0, or None")
        if self.outlier_deviations is not None and not self.outlier_deviations > 0:
            raise ValueError(f"outlier_deviations={self.outlier_deviations}: must be > 0, or None")
        if self.outlier_rounds < 2:
            raise ValueError(f"outlier_rounds={self.outlier_rounds}: must be >= 2")
        if self.nesterov and self.momentum == 0:
            raise ValueError(f"nesterov={self.nesterov}: needs momentum > 0; set nesterov=False")

    @property
    def reads_norms(self) -> bool:
        """Whether the norms of workers' pseudo-gradients matter."""
        return self.radial or self.clip_norm is not None or self.outlier_deviations is not None

    def step(self, anchor: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor) -> None:
        """Take the step of torch.optim.SGD (dampening 0) in place, in operations that round alike on every device.

        The ranks of a group may compute on CPUs and on GPUs, and must come to the same bits. One operation that
        multiplies and adds (torch's fused SGD, `add_` with an alpha) rounds twice on a CPU and once on a GPU.

        Args:
            anchor, gradient: (n,) each, on one device.
            momentum: (n,), zeros before the first step; None where the optimizer has none.
        """
        if momentum is None:
            update = gradient * self.lr
        else:
            momentum.mul_(self.momentum).add_(gradient)
            update = (momentum * self.momentum).add_(gradient).mul_(self.lr) if self.nesterov else momentum * self.lr
        anchor.sub_(update)


def chunk_elements(device: torch.device) -> int:
    """Elements of flat vectors that are worked through at one time on `device`."""
    return CPU_CHUNK_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else GPU_CHUNK_ELEMENTS


def chunks(num_elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of a vector, each of which is worked through at one time on `device`."""
    size = chunk_elements(device)
    for start in range(0, num_elements, size):
        yield slice(start, min(start + size, num_elements))


def clip_scale(clip_norm: float | None, norm: float) -> float:
    """What a pseudo-gradient of that norm is multiplied by (EDiT, 2412.07210, clips it so, too).

    It is each worker's own that is clipped, before the sum: nothing that ranks must agree on depends on a norm, which
    devices compute in different orders.
    """
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


def pseudo_gradient(
    anchor: torch.Tensor, workers: Sequence[torch.Tensor], total: torch.Tensor, scales: Sequence[float] = ()
) -> None:
    """Fill `total` with the sum of x - w over `workers`; with zeros where there are none.

    Args:
        anchor: (n,), or any other shape, in the anchor's type, on any device.
        workers: their weights, as many elements each, in any floating-point type, on any device.
        total: as many elements, in the anchor's type, on the device that computes.
        scales: what the differences are multiplied by, by worker; none: by nothing.
    """
    if not workers:
        total.zero_()
        return
    anchor = anchor.to(total.device, non_blocking=True)
    for index, weights in enumerate(workers):
        # A worker of lower precision started from the rounded anchor: what rounding took away is no progress of it,
        # and stays in the anchor.
        start = anchor if weights.dtype == anchor.dtype else anchor.to(weights.dtype).to(anchor.dtype)
        # Differences first: x - w is small beside x, and a sum of weights would round it away.
        weights = weights.to(total.device, non_blocking=True)
        difference = torch.sub(start, weights, out=total) if index == 0 else start - weights
        if scales:
            difference.mul_(scales[index])
        if index > 0:
            total.add_(difference)


def outer_step(
    optimizer: OuterSGD, anchor: torch.Tensor, momentum: torch.Tensor | None, total: torch.Tensor, num_workers: float
) -> torch.Tensor:
    """Make the summed pseudo-gradients their mean, and take the optimizer's step with it, in place.

    Args:
        anchor, momentum: (n,) each; on the device, or in CPU memory, pinned: then they are copied to the device and
            back in the order of its work, without waiting for it.
        total: (n,), on the device that computes; the mean afterwards.
        num_workers: those in the sum, or the sum of their weights; 0: the anchor stays.

    Returns:
        The new anchor on the device, (n,).
    """
    state = [anchor] if momentum is None else [anchor, momentum]
    near = [vector.to(total.device, non_blocking=True) for vector in state]
    if num_workers:
        # Times the reciprocal: a GPU divides by a number of the host in that way, a CPU does not.
        optimizer.step(near[0], near[1] if momentum is not None else None, total.mul_(1 / num_workers))
        if anchor.device != total.device:
            for home, new in zip(state, near, strict=True):
                home.copy_(new, non_blocking=True)
    return near[0]


def restart(workers: Iterable[torch.Tensor], anchor: torch.Tensor) -> None:
    """Give workers the weights of the anchor, of as many elements, each in its own type and on its own device."""
    for weights in workers:
        weights.copy_(anchor, non_blocking=True)


def rejoin(weights: torch.Tensor, departed: torch.Tensor, anchor: torch.Tensor) -> None:
    """Bring a step to a worker that has taken updates since its weights were sent off: x + (w - departed).

    What it has learned since then is kept; it travels with the next pseudo-gradient.

    Args:
        departed: its weights as they were sent off; used as scratch.
    """
    weights.sub_(departed.sub_(anchor.to(departed)).to(weights))
