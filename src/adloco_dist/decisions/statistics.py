"""Gradient statistics of a trainer from a few mean gradients (design, section 3.1; derived in docs/theory.md).

Chunk j of J holds s_j sequences and has mean gradient g_j; S = sum s_j, gbar = sum s_j g_j / S.
"""

import math
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

LEAST_CHUNKS_FOR_CORRECTION = 4
"""Chunks from which on the noise of gbar can be taken out of the inner-product variance."""


@dataclass(frozen=True)
class GradientStatistics:
    """What the tests need, per sequence; raw of one round, or smoothed over rounds."""

    trace: float
    """tr(Sigma): the trace of the covariance of one sequence's gradient, unbiased."""
    squared_norm: float
    """|G|^2 of the true gradient, unbiased: may be negative where noise dominates."""
    mean_squared_norm: float
    """|gbar|^2 of the measured mean gradient, its noise included."""
    ip_variance: float
    """V_ip: variance of the inner product of one sequence's gradient with the gradient."""
    ip_squared_norm: float
    """The squared norm that belongs to V_ip: |G|^2 where gbar's noise was taken out of V_ip, else |gbar|^2."""
    ip_error: float
    """What inner products of sketches had added to V_ip, already taken out of it; 0 for exact gradients."""
    orthogonal_variance: float
    """V_orth: the part of tr(Sigma) across the gradient."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in astuple(self))

    @property
    def noise_scale(self) -> float:
        """B_noise = tr(Sigma) / |G|^2 in sequences; infinite where only noise was measured."""
        return ratio(self.trace, self.squared_norm)


@dataclass(frozen=True)
class Smoothed:
    """Running averages of every statistic by itself; ratios are taken of these."""

    statistics: GradientStatistics | None = None
    weight: float = 0.0
    """Sum of the weights given so far: 1 - decay^rounds, by which the averages are already divided."""

    def after(self, new: GradientStatistics, decay: float) -> "Smoothed":
        """The bias-corrected exponential average that includes `new`."""
        if self.statistics is None:
            return Smoothed(new, 1 - decay)
        weight = decay * self.weight + 1 - decay
        old_share = decay * self.weight / weight
        values = {
            field.name: old_share * getattr(self.statistics, field.name) + (1 - old_share) * getattr(new, field.name)
            for field in fields(new)
        }
        return Smoothed(GradientStatistics(**values), weight)


def num_chunks(batch: int, most: int) -> int:
    """Pieces that a worker's first batch is cut into: at most `most`, and of two sequences or more.

    A pass of its own for every sequence of a small batch would cost more than a percent of a round, and tell hardly
    more (docs/lab-notes.md). Two pieces it must be to measure anything, so a batch of two or three makes two.
    """
    return min(batch, max(2, min(most, batch // 2)))


def ratio(noise: float, signal: float) -> float:
    """noise / signal: 0 without noise, infinite where there is noise but no signal."""
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf


def statistics_from_gram(
    gram: npt.NDArray[np.float64], sizes: Vector, plugin: bool, sketch_size: int | None = None
) -> GradientStatistics:
    """The statistics from all inner products of the chunks' mean gradients.

    Args:
        gram: (J, J); J >= 2.
        sizes: (J,) s_j.
        plugin: leave gbar's own noise in V_ip, as the plug-in formula of the tests does.
        sketch_size: length of the sketches whose products `gram` holds; None: exact gradients.
    """
    total, freedom = sizes.sum(), len(sizes) - 1
    products = gram @ sizes / total
    mean_squared_norm = float(products @ sizes / total)
    correction = None
    if len(sizes) >= LEAST_CHUNKS_FOR_CORRECTION and not plugin:
        centred = gram - products[:, None] - products[None, :] + mean_squared_norm
        covariance = np.sqrt(np.outer(sizes, sizes)) * centred / freedom
        # Unbiased for tr(Sigma^2) where chunk means are Gaussian.
        squares = float(np.sum(covariance**2)) - float(np.trace(covariance)) ** 2 / freedom
        correction = freedom**2 / ((freedom - 1) * (freedom + 2)) * squares / total
    return statistics_from_moments(np.diag(gram), products, mean_squared_norm, sizes, correction, sketch_size)


def statistics_from_moments(
    squared_norms: Vector,
    products: Vector,
    mean_squared_norm: float,
    sizes: Vector,
    correction: float | None = None,
    sketch_size: int | None = None,
) -> GradientStatistics:
    """The statistics from every chunk's squared norm and its inner product with the mean.

    Args:
        squared_norms: (J,) |g_j|^2; J >= 2.
        products: (J,) a_j = <g_j, gbar>.
        mean_squared_norm: |gbar|^2.
        sizes: (J,) s_j.
        correction: tr(Sigma^2) / S, what gbar's own noise adds to V_ip; None: unknown, it stays in.
        sketch_size: as in `statistics_from_gram`.
    """
    total, freedom = float(sizes.sum()), len(sizes) - 1
    trace = float(sizes @ squared_norms - total * mean_squared_norm) / freedom
    squared_norm = mean_squared_norm - trace / total
    ip_squared_norm = mean_squared_norm if correction is None else squared_norm
    ip_error = max(0.0, trace * ip_squared_norm / sketch_size) if sketch_size else 0.0
    ip_variance = float(sizes @ (products - mean_squared_norm) ** 2) / freedom - (correction or 0.0) - ip_error
    along = ip_variance / ip_squared_norm if ip_squared_norm > 0 else 0.0
    return GradientStatistics(
        trace=trace,
        squared_norm=squared_norm,
        mean_squared_norm=mean_squared_norm,
        ip_variance=ip_variance,
        ip_squared_norm=ip_squared_norm,
        ip_error=ip_error,
        orthogonal_variance=max(0.0, trace - along),
    )
