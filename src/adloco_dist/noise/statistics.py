"""Gradient statistics as plain numbers, raw or smoothed (design, section 3.1); what they mean is in docs/theory.md."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True)
class GradientStatistics:
    """What the batch tests need, per sequence; raw from one measurement, or smoothed over several."""

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

    @classmethod
    def mean_of(cls, several: Sequence["GradientStatistics"]) -> "GradientStatistics":
        """The mean of statistics that were taken at different points, each of them unbiased."""
        means = {field.name: sum(getattr(one, field.name) for one in several) / len(several) for field in fields(cls)}
        return cls(**means)

    @property
    def noise_scale(self) -> float:
        """B_noise = tr(Sigma) / |G|^2 in sequences; infinite where only noise was measured."""
        return ratio(self.trace, self.squared_norm)

    @property
    def resolves_inner_products(self) -> bool:
        """Whether V_ip is at least half of what was measured of it; the rest was the sketch's error."""
        return self.ip_error <= self.ip_variance


@dataclass(frozen=True)
class Smoothed:
    """Running averages of the statistics, each by itself; ratios are taken of these."""

    statistics: GradientStatistics | None = None
    weight: float = 0.0
    """Sum of the weights given so far: 1 - decay^measurements, by which the averages are already divided."""

    def after(self, new: GradientStatistics, decay: float) -> "Smoothed":
        """The bias-corrected exponential average that includes `new`, whose share in it is (1 - decay) / weight."""
        if self.statistics is None:
            return Smoothed(new, 1 - decay)
        weight = decay * self.weight + 1 - decay
        old_share = decay * self.weight / weight
        values = {
            field.name: old_share * getattr(self.statistics, field.name) + (1 - old_share) * getattr(new, field.name)
            for field in fields(new)
        }
        return Smoothed(GradientStatistics(**values), weight)


def num_chunks(batch: int, max_chunks: int) -> int:
    """Chunks that a batch of one worker is cut into: at most `max_chunks`, each of two sequences or more.

    A backward pass for every sequence of a small batch would cost more than a percent of a round and hardly measure
    better (docs/lab-notes.md). It takes two chunks to measure anything, so a batch of two or three makes two.
    """
    return min(batch, max(2, min(max_chunks, batch // 2)))


def ratio(noise: float, signal: float) -> float:
    """noise / signal: 0 without noise, infinite where there is noise but no signal."""
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf
