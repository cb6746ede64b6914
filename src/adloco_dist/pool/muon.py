"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024; 2502.16982), for many of them at once and for
those that ranks share."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from adloco_dist.averaging.shards import Shards
from adloco_dist.objective.matrices import Matrices
from adloco_dist.vectors import Deal

STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Steps of the Newton-Schulz iteration, and its coefficients: x becomes A x + B x^3 + C x^5, as in torch.optim.Muon."""
MIN_NORM = 1e-7
RMS = 0.2
"""Root mean square of a matrix's update at a rate of 1, as that of AdamW's: one rate suits both (2502.16982)."""
BATCH_BYTES = 1 << 27
"""Matrices of one shape that a GPU orthogonalises at once. A CPU takes one by one, which stay in its cache."""
COPIES = 8
"""Memory of orthogonalising, over that of the matrices in fp32: momenta, what travels, and the iteration's own."""


def working_bytes(matrices: Matrices) -> int:
    """Memory in which one parameter's matrices are orthogonalised, at most."""
    return COPIES * torch.float32.itemsize * math.prod(matrices.shape)


def orthogonalized(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest orthogonal matrices, roughly: singular values become some 0.7 to 1.2; computed in `dtype`.

    In bf16 it is torch's own sequence of operations, in the same bits; of tall matrices of some size a CPU sums one and
    several in different orders. In other types long matrices are multiplied once at the end, by the product of all
    steps: those are polynomials in the small matrix of their rows' inner products. That needs fewer operations, but
    bf16 rounds the product too coarsely.

    Args:
        matrices: (count, rows, columns).
    """
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.to(dtype)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    if dtype is torch.bfloat16 or x.size(2) <= 2 * x.size(1):
        for _ in range(STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    else:
        gram, product = x @ x.mT, None
        for step in range(STEPS):
            factor = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
            factor.diagonal(dim1=1, dim2=2).add_(A)
            product = factor if product is None else factor @ product
            if step < STEPS - 1:
                gram = factor @ (factor @ gram)
        assert product is not None
        x = product @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw": Nesterov momentum, decoupled weight decay.

    Parameters may be this rank's parts of such that ranks share: then these send parts of momenta to one of them, which
    orthogonalises the whole and sends parts back, and a step is collective over them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float, dtype: torch.dtype, shards: Shards) -> None:
        """
        Args:
            groups: each with one parameter in `params`, its `matrices`, `lr` and `weight_decay`.
            dtype: in which matrices are orthogonalised.
            shards: the ranks that share the parameters.
        """
        super().__init__(groups, {})
        self._momentum, self._dtype, self._shards = momentum, dtype, shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, those of one shape together; there is no closure."""
        by_shape: dict[Matrices, list[dict[str, Any]]] = {}
        for group in self.param_groups:
            by_shape.setdefault(group["matrices"], []).append(group)
        for matrices, groups in by_shape.items():
            at_once = BATCH_BYTES // (math.prod(matrices.shape) * self._dtype.itemsize)
            is_on_gpu = groups[0]["params"][0].is_cuda
            size = max(1, at_once if is_on_gpu else 1, len(self._shards.ranks))
            for first in range(0, len(groups), size):
                self._update(matrices, groups[first : first + size])

    def _update(self, matrices: Matrices, groups: Sequence[dict[str, Any]]) -> None:
        momenta = []
        for group in groups:
            (parameter,) = group["params"]
            buffer = self.state[parameter]["momentum_buffer"]
            buffer.lerp_(parameter.grad, 1 - self._momentum)
            momenta.append(parameter.grad.lerp(buffer, self._momentum))
        scale = RMS * math.sqrt(max(matrices.stack[1:]))
        updates = (
            self._shared(matrices, momenta) if self._shards.ranks else self._orthogonal(matrices, torch.stack(momenta))
        )
        for group, update in zip(groups, updates, strict=True):
            (parameter,), rate = group["params"], group["lr"]
            parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(update, alpha=-rate * scale)

    def _orthogonal(self, matrices: Matrices, whole: torch.Tensor) -> torch.Tensor:
        """The parameters (number, *shape) with their matrices made orthogonal."""
        return orthogonalized(whole.view(-1, *matrices.stack[1:]), self._dtype).reshape(whole.shape)

    def _shared(self, matrices: Matrices, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of what is orthogonal; the ranks take turns to have a whole. Collective."""
        ranks, stacked = self._shards.ranks, torch.stack(list(parts))
        deal = Deal.of(matrices.shape, len(ranks))
        assert deal
        owned = [stacked[owner :: len(ranks)].contiguous() for owner in range(len(ranks))]  # of some maybe nothing
        gathered = self._shards.exchange(owned, [owned[self._shards.index]] * len(ranks))
        orthogonal = self._orthogonal(matrices, torch.cat(gathered, dim=1 + deal.dimension))
        pieces = [piece.contiguous() for piece in orthogonal.chunk(len(ranks), dim=1 + deal.dimension)]
        done = self._shards.exchange(pieces, [part.to(self._dtype) for part in owned])
        return [done[number % len(ranks)][number // len(ranks)] for number in range(len(parts))]
