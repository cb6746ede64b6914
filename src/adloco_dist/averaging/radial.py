"""Means of directions and of lengths, tensor by tensor (radial-directional averaging, Decoupled DiLoCo, 2604.21428).

The mean of vectors that point different ways is shorter than they are: of M orthogonal ones by the square root of M.
Here the mean of a tensor has the direction of the mean of unit vectors, and the mean of the vectors' lengths. What
travels are sums of unit vectors, and one number more for each tensor: the sum of their lengths.
"""

from collections.abc import Sequence
from math import frexp, isfinite, ldexp, nan, sqrt

import torch

_CHUNK_ELEMENTS = 1 << 20
_BITS = 21
"""Of the whole numbers that elements are rounded to: a chunk of their squares adds up to less than 2^63."""


def exact_norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The Euclidean norms of flat tensors on one device, in the same bits on every device; NaN where one is not finite.

    Ranks that scale their anchors by a norm must come to the same. A sum of squares depends on its order, which is
    every device's own; a sum of whole numbers does not. Elements are rounded to 2^-21 of a tensor's largest one.
    """
    if not tensors:
        return []
    largest = torch.stack([tensor.abs().max() for tensor in tensors]).tolist()
    exponents = [max(frexp(one)[1], -1000) if isfinite(one) else 0 for one in largest]
    sums = [
        [_square_sum(chunk, ldexp(1.0, _BITS - exponent)) for chunk in tensor.split(_CHUNK_ELEMENTS)]
        for tensor, exponent in zip(tensors, exponents, strict=True)
    ]
    found = iter(torch.stack([one for chunks in sums for one in chunks]).tolist())
    counts = [sum(next(found) for _ in chunks) for chunks in sums]
    return [
        ldexp(sqrt(count), exponent - _BITS) if isfinite(one) else nan
        for one, count, exponent in zip(largest, counts, exponents, strict=True)
    ]


def _square_sum(chunk: torch.Tensor, scale: float) -> torch.Tensor:
    return (chunk.double() * scale).round_().to(torch.int64).square_().sum()


def restore_lengths(sums: Sequence[torch.Tensor], lengths: Sequence[float]) -> None:
    """Scale sums of unit vectors, in place, to sums of lengths: divided by a count, both are the means that are wanted.

    A sum of zero has no direction, and stays.

    Args:
        sums: flat tensors on one device, the same bits on every rank.
        lengths: their norms afterwards, the same on every rank.
    """
    for one, length, norm in zip(sums, lengths, exact_norms(sums), strict=True):
        if norm != 0:
            one.mul_(length / norm)
