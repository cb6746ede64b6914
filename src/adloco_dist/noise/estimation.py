"""Gradient statistics from the mean gradients of a few chunks of sequences (derived in docs/theory.md), and their
averages over a run, with standard errors.

Chunk j of J holds s_j sequences and has mean gradient g_j; S = sum s_j, gbar = sum s_j g_j / S. All arithmetic is in
fp64 on the CPU, on at most J x J numbers.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from adloco_dist.noise.requests import augmented_inner_product_test, inner_product_test, norm_test
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.noise.statistics import GradientStatistics, Smoothed

MIN_CHUNKS_FOR_CORRECTION = 4
"""Chunks from which on the noise of gbar can be taken out of the inner-product variance."""
MIN_CHUNKS_FOR_JACKKNIFE = 3
"""Chunks from which on two are left, which still have a variance, when one is left out."""


def statistics_from_gram(
    gram: torch.Tensor, sizes: torch.Tensor, plugin: bool = False, sketch_size: int | None = None
) -> GradientStatistics:
    """Compute the statistics from all inner products of the chunks' mean gradients.

    Args:
        gram: (J, J); J >= 2.
        sizes: (J,) s_j.
        plugin: leave gbar's own noise in V_ip, as the plug-in formula of the tests does.
        sketch_size: length of the sketches whose products `gram` holds; None: exact gradients.
    """
    gram, sizes = _exact(gram), _exact(sizes)
    total, freedom = float(sizes.sum()), len(sizes) - 1
    products = gram @ sizes / total  # a_j = <g_j, gbar>
    mean_squared_norm = float(products @ sizes) / total
    trace = (float(sizes @ gram.diag()) - total * mean_squared_norm) / freedom
    squared_norm = mean_squared_norm - trace / total
    # tr(Sigma^2) / S is what gbar's own noise adds to V_ip; where it is unknown, it stays in.
    correction = None
    if len(sizes) >= MIN_CHUNKS_FOR_CORRECTION and not plugin:
        centred = gram - products[:, None] - products + mean_squared_norm
        covariance = (sizes[:, None] * sizes).sqrt() * centred / freedom
        # Unbiased for tr(Sigma^2) where chunk means are Gaussian.
        squares = covariance.square().sum() - covariance.trace() ** 2 / freedom
        correction = float(freedom**2 / ((freedom - 1) * (freedom + 2)) * squares / total)
    ip_squared_norm = mean_squared_norm if correction is None else squared_norm
    ip_error = max(0.0, trace * ip_squared_norm / sketch_size) if sketch_size else 0.0
    ip_variance = float(sizes @ (products - mean_squared_norm).square()) / freedom - (correction or 0.0) - ip_error
    return GradientStatistics(
        trace=trace,
        squared_norm=squared_norm,
        sequences=total,
        ip_variance=ip_variance,
        ip_error=ip_error,
        ip_corrected=correction is not None,
    )


def jackknife_covariance(gram: torch.Tensor, sizes: torch.Tensor, sketch_size: int | None = None) -> torch.Tensor:
    """Estimate the (2, 2) covariance of one measurement's trace and squared norm by leaving out one chunk at a time.

    With theta_j the two statistics without chunk j, it is (J - 1) / J sum (theta_j - mean)(theta_j - mean)' (Efron and
    Stein 1981: never too small in expectation).

    Args:
        gram, sizes, sketch_size: as in `statistics_from_gram`; J >= MIN_CHUNKS_FOR_JACKKNIFE.
    """
    gram, sizes = _exact(gram), _exact(sizes)
    count, totals = len(sizes), sizes.sum() - sizes
    weighted_norms = sizes * gram.diag()
    products = gram @ sizes
    # |sum of s_k g_k over k != j|^2
    sum_squared_norms = sizes @ products - 2 * sizes * products + sizes * weighted_norms
    traces = (weighted_norms.sum() - weighted_norms - sum_squared_norms / totals) / (count - 2)
    squared_norms = sum_squared_norms / totals**2 - traces / totals
    deviations = torch.stack([traces - traces.mean(), squared_norms - squared_norms.mean()])
    covariance = (count - 1) / count * deviations @ deviations.T
    if sketch_size:
        # All chunks are sketched with the same signs: what these do to |G|^2 is not seen by leaving chunks out.
        covariance[1, 1] += 2 / sketch_size * squared_norms.mean() ** 2
    return covariance


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", torch.float64)


@dataclass(frozen=True)
class NoiseEstimate:
    """What was measured, smoothed over the measurements so far; each error is one standard error of that average.

    Errors are those of sampling. They do not include how far the average lags behind statistics that change.
    """

    statistics: GradientStatistics
    """Everything that batch tests use (adloco_dist.noise.requests)."""
    trace_error: float
    squared_norm_error: float
    noise_scale_error: float
    """Standard error by the delta method; infinite where only noise was measured."""
    num_chunks: int
    """Mean gradients that the last measurement compared."""
    num_sequences: int
    """Total batch of the last measurement."""
    num_measurements: int

    @property
    def trace(self) -> float:
        """`tr(Sigma)`: the trace of the covariance of one sequence's gradient."""
        return self.statistics.trace

    @property
    def squared_norm(self) -> float:
        """`|G|^2` of the true gradient, unbiased: may be negative where noise dominates."""
        return self.statistics.squared_norm

    @property
    def noise_scale(self) -> float:
        """`tr(Sigma) / |G|^2`: the batch, in sequences, whose mean gradient is as much noise as signal."""
        return self.statistics.noise_scale

    def batch_of_norm_test(self, eta: float = 0.8) -> float:
        """The total batch, in sequences, whose mean gradient deviates from the true one by eta of its norm."""
        return norm_test(self.statistics, eta).sequences

    def batch_of_inner_product_test(self, theta: float = 0.9) -> float:
        """The total batch, in sequences, whose mean gradient deviates along the true one by theta of its norm."""
        return inner_product_test(self.statistics, theta).sequences

    def batch_of_augmented_inner_product_test(self, theta: float = 0.9, nu: float = 5.84) -> float:
        """The same as `batch_of_inner_product_test`, raised until the deviation across is at most nu of the norm."""
        return augmented_inner_product_test(self.statistics, theta, nu).sequences

    def __str__(self) -> str:
        return (
            f"noise scale {self.noise_scale:.4g} ± {self.noise_scale_error:.2g} sequences "
            f"(trace {self.trace:.4g} ± {self.trace_error:.2g}, "
            f"squared norm {self.squared_norm:.4g} ± {self.squared_norm_error:.2g}; "
            f"{self.num_chunks} chunks of {self.num_sequences} sequences, measurement {self.num_measurements})"
        )


class RunningEstimate:
    """Averages each statistic by itself over a span of the measurements so far (a share in [0, 1]; 0: the last one
    alone), and knows the covariance of trace and squared norm."""

    def __init__(self, span: float) -> None:
        self._span = span
        self._smoothed = Smoothed()
        self._covariance: torch.Tensor | None = None
        """Covariance of the averages, (2, 2); None: not known yet."""
        self._last: torch.Tensor | None = None
        """Trace and squared norm of the last measurement, (2,)."""

    def include(self, gram: torch.Tensor, sizes: torch.Tensor) -> NoiseEstimate | None:
        """The estimate that includes one more measurement; None, and nothing has changed, if that is not finite.

        It is of J chunks: (J, J) inner products of sketches of their mean gradients, and (J,) sequences.
        """
        measured = statistics_from_gram(gram, sizes, sketch_size=BUCKETS)
        if not measured.is_finite:
            return None
        self._smoothed = self._smoothed.after(measured, self._smoothed.trained + 1, self._span)
        pair = torch.tensor([measured.trace, measured.squared_norm], dtype=torch.float64)
        covariance = None
        if len(sizes) >= MIN_CHUNKS_FOR_JACKKNIFE:
            covariance = jackknife_covariance(gram, sizes, BUCKETS)
        elif self._last is not None:  # of two chunks, by the change since the last measurement
            covariance = torch.outer(pair - self._last, pair - self._last) / 2
        if covariance is not None:
            # The first measurement of two chunks says nothing about its error, the second says it about both.
            before = covariance if self._covariance is None else self._covariance
            share = 1 / self._smoothed.tokens
            self._covariance = share**2 * covariance + (1 - share) ** 2 * before
        self._last = pair
        return self._estimate(len(sizes), int(sizes.sum()))

    def state(self) -> dict[str, Any]:
        """Return the averages and counters as plain values."""
        statistics = self._smoothed.statistics
        return {
            "statistics": None if statistics is None else asdict(statistics),
            "spanned": self._smoothed.tokens,
            "num_measurements": int(self._smoothed.trained),
            "covariance": None if self._covariance is None else self._covariance.tolist(),
            "last": None if self._last is None else self._last.tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        statistics = state["statistics"] and GradientStatistics(**state["statistics"])
        self._smoothed = Smoothed(statistics, state["spanned"], state["num_measurements"])
        self._covariance, self._last = (
            None if state[name] is None else torch.tensor(state[name], dtype=torch.float64)
            for name in ("covariance", "last")
        )

    def _estimate(self, num_chunks: int, num_sequences: int) -> NoiseEstimate:
        statistics = self._smoothed.statistics
        assert statistics is not None
        covariance = torch.full((2, 2), math.inf) if self._covariance is None else self._covariance
        noise_scale_error = math.inf
        if self._covariance is not None and statistics.squared_norm > 0:
            slopes = torch.tensor([1.0, -statistics.noise_scale], dtype=torch.float64) / statistics.squared_norm
            noise_scale_error = math.sqrt(max(0.0, float(slopes @ self._covariance @ slopes)))
        return NoiseEstimate(
            statistics,
            trace_error=math.sqrt(float(covariance[0, 0])),
            squared_norm_error=math.sqrt(float(covariance[1, 1])),
            noise_scale_error=noise_scale_error,
            num_chunks=num_chunks,
            num_sequences=num_sequences,
            num_measurements=int(self._smoothed.trained),
        )
