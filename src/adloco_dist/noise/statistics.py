"""Gradient statistics as plain numbers, raw or smoothed (docs/theory.md, "What is measured")."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

OUTLIER_FACTOR = 3.0
"""Multiple of the averaged trace that one measurement counts as at most: a few odd sequences can have a hundred times
the gradients of others."""
MIN_MEASUREMENTS = 3
"""Measurements that an average spans at least, once there are so many."""
MAX_CHUNKS = 4
"""Pieces that a worker's first batch of a round is cut into at most."""


@dataclass(frozen=True)
class GradientStatistics:
    """What the batch tests need, per sequence; raw from one measurement, or smoothed over several."""

    trace: float
    """tr(Sigma): the trace of the covariance of one sequence's gradient, unbiased."""
    squared_norm: float
    """`|G|^2` of the true gradient, unbiased: may be negative where noise dominates."""
    sequences: float
    """S: the sequences that were measured, the last time."""
    ip_variance: float
    """V_ip: variance of the inner product of one sequence's gradient with the gradient."""
    ip_error: float
    """What inner products of sketches had added to V_ip, already taken out of it; 0 for exact gradients."""
    ip_corrected: bool
    """Whether the noise of the measured mean gradient was taken out of V_ip."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in astuple(self))

    @classmethod
    def mean_of(
        cls, several: Sequence["GradientStatistics"], weights: Sequence[float] | None = None
    ) -> "GradientStatistics":
        """The mean of statistics that were taken at different points, each of them unbiased; with positive weights."""
        weighted = list(zip(weights or [1.0] * len(several), several, strict=True))
        total = sum(weight for weight, _ in weighted)
        means = {
            name: sum(weight * getattr(statistics, name) for weight, statistics in weighted) / total
            for name in ("trace", "squared_norm", "sequences", "ip_variance", "ip_error")
        }
        return cls(**means, ip_corrected=all(statistics.ip_corrected for statistics in several))

    @property
    def mean_squared_norm(self) -> float:
        """E |gbar|^2 of the mean gradient of S sequences, its noise included; of one measurement, what was measured."""
        return self.squared_norm + self.trace / self.sequences

    @property
    def ip_squared_norm(self) -> float:
        """The squared norm that belongs to V_ip: with gbar's noise where that was left in V_ip."""
        return self.squared_norm if self.ip_corrected else self.mean_squared_norm

    @property
    def orthogonal_variance(self) -> float:
        """V_orth: the part of tr(Sigma) across the gradient."""
        along = self.ip_variance / self.ip_squared_norm if self.ip_squared_norm > 0 else 0.0
        return max(0.0, self.trace - along)

    @property
    def noise_scale(self) -> float:
        """B_noise = tr(Sigma) / |G|^2 in sequences; infinite where only noise was measured."""
        return ratio(self.trace, self.squared_norm)

    @property
    def resolves_inner_products(self) -> bool:
        """Whether V_ip is at least half of what was measured of it; the rest was the sketch's error."""
        return self.ip_error <= self.ip_variance

    def as_measured(self) -> "GradientStatistics":
        """The same with the measured mean's own noise in |G|^2, as the plug-in formulas of the tests have it."""
        return replace(self, squared_norm=self.mean_squared_norm, sequences=math.inf)

    def scaled(self, factor: float) -> "GradientStatistics":
        """The statistics of gradients whose squared norms are `factor` times as large."""
        return replace(
            self,
            trace=factor * self.trace,
            squared_norm=factor * self.squared_norm,
            ip_variance=factor**2 * self.ip_variance,
            ip_error=factor**2 * self.ip_error,
        )


@dataclass(frozen=True)
class Smoothed:
    """Running averages of the statistics, each by itself; ratios are taken of these.

    An average spans a share of the tokens that were trained on so far: statistics change by powers of these, so that
    it lags behind by the same factor early and late, and averages more noise away in a longer training.
    """

    statistics: GradientStatistics | None = None
    tokens: float = 0.0
    """What the averages stand on: the tokens that were trained on while they were measured."""
    trained: float = 0.0
    """Tokens that had been trained on at the last measurement."""

    def after(self, new: GradientStatistics, trained: float, span: float) -> "Smoothed":
        """The averages that include one more measurement.

        Args:
            trained: tokens that have been trained on so far.
            span: share of `trained` that the averages span, at least MIN_MEASUREMENTS like this one; 0: no averaging.
        """
        tokens = trained - self.trained
        if self.statistics is None or not span:
            return Smoothed(new, tokens, trained)
        kept = min(self.tokens, max(span * trained, MIN_MEASUREMENTS * tokens) - tokens)
        if new.trace > (largest := OUTLIER_FACTOR * self.statistics.trace) > 0:
            new = new.scaled(largest / new.trace)
        mean = replace(GradientStatistics.mean_of([self.statistics, new], [kept, tokens]), sequences=new.sequences)
        if not mean.ip_corrected:  # with gbar's noise in it, V_ip depends on the batch it was measured with
            mean = replace(mean, ip_variance=new.ip_variance, ip_error=new.ip_error, ip_corrected=new.ip_corrected)
        return Smoothed(mean, kept + tokens, trained)

    @classmethod
    def of_merged(cls, members: Sequence[tuple[float, "Smoothed"]]) -> "Smoothed":
        """What a merge leaves of the averages of its members, each with its share: their mean, counted half.

        The statistics at the average of the members' weights are not those at any of them, but far closer to these
        than one measurement is.
        """
        measured = [(share, member) for share, member in members if member.statistics and share > 0]
        if not measured:
            return cls()
        shares = [share for share, _ in measured]
        statistics = [member.statistics for _, member in measured if member.statistics]
        tokens = sum(share * member.tokens for share, member in measured) / sum(shares)
        mean = GradientStatistics.mean_of(statistics, shares)
        return cls(mean, tokens / 2, max(member.trained for _, member in measured))


def num_chunks(batch: int) -> int:
    """Chunks that a batch of one worker is cut into: at most MAX_CHUNKS, each of two sequences or more.

    A backward pass for every sequence of a small batch would cost more than a percent of a round and hardly measure
    better (docs/lab-notes.md). It takes two chunks to measure anything, so a batch of two or three makes two.
    """
    return min(batch, max(2, min(MAX_CHUNKS, batch // 2)))


def ratio(noise: float, signal: float) -> float:
    """noise / signal: 0 without noise, infinite where there is noise but no signal."""
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf
