"""Gradient statistics from the mean gradients of a few chunks of sequences (derived in docs/theory.md).

Chunk j of J holds s_j sequences and has mean gradient g_j; S = sum s_j, gbar = sum s_j g_j / S. All arithmetic is in
fp64 on the CPU, on at most J x J numbers.
"""

import torch

from adloco_dist.noise.statistics import GradientStatistics

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
    """Estimate the covariance of one measurement's (trace, squared_norm) by leaving out one chunk at a time.

    With theta_j the two statistics without chunk j, it is (J - 1) / J sum (theta_j - mean)(theta_j - mean)' (Efron and
    Stein 1981: never too small in expectation).

    Args:
        gram, sizes, sketch_size: as in `statistics_from_gram`; J >= MIN_CHUNKS_FOR_JACKKNIFE.

    Returns:
        (2, 2).
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
