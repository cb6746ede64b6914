"""The total batch that each batch test asks for (docs/theory.md, "What is asked for").

An averaged gradient of B sequences has variance tr(Sigma) / B; a test asks for the smallest B at which that is small
beside the gradient. Norm test: Byrd et al. 2012; inner-product tests: Bollapragada, Byrd, Nocedal 2018 (1710.11258);
all as in AdLoCo (2508.18182), section 4.1.
"""

import math
from dataclasses import dataclass

from adloco_dist.noise.statistics import GradientStatistics, ratio


@dataclass(frozen=True)
class Request:
    """A total batch in sequences, a real number or infinity, and a note for the user."""

    sequences: float
    note: str | None = None


def norm_test(statistics: GradientStatistics, eta: float) -> Request:
    """B = tr(Sigma) / (eta^2 |G|^2): the averaged gradient deviates by eta |G|; a smaller eta asks for more."""
    return Request(ratio(statistics.trace, eta**2 * statistics.squared_norm), _note(statistics))


def inner_product_test(statistics: GradientStatistics, theta: float) -> Request:
    """B = V_ip / (theta^2 |G|^4): the same along the gradient only, by theta |G|.

    Where the statistics do not resolve inner products, the number is noise, and the note says so.
    """
    # Squared only above zero: a negative norm is noise alone, not a small denominator.
    signal = (theta * max(0.0, statistics.ip_squared_norm)) ** 2
    note = None if statistics.resolves_inner_products else "inner products are lost in the sketch's error"
    return Request(ratio(statistics.ip_variance, signal), note or _note(statistics))


def augmented_inner_product_test(statistics: GradientStatistics, theta: float, nu: float) -> Request:
    """The larger of the inner-product test and B = V_orth / (nu^2 |G|^2), which bounds what is across the gradient."""
    along = inner_product_test(statistics, theta)
    across = ratio(statistics.orthogonal_variance, nu**2 * statistics.squared_norm)
    return Request(max(along.sequences, across), along.note)


def progress_per_second(
    noise_scale: float, num_workers: float, sequence_seconds: float, fixed_seconds: float
) -> Request:
    """B = sqrt(M B_noise t_fixed / t_sequence): the total batch with the most progress per second (docs/theory.md).

    An update of total batch B makes progress in proportion to 1 / (1 + B_noise / B), in t_fixed + B t_sequence / M.
    Where nothing is fixed no batch is better than a small one, however large the noise; where sequences cost nothing,
    as on a GPU that waits for its launches, none than a large one.

    Args:
        noise_scale: B_noise, or as many sequences as the inner optimizer bears instead of them.
        num_workers: M, workers that compute their parts of an update side by side.
        sequence_seconds: t_sequence, what a further one adds to forward and backward pass.
        fixed_seconds: t_fixed, what an update takes whatever its batch: a pass's own, the optimizer, its share of
            averages.
    """
    if fixed_seconds <= 0:
        return Request(0.0)
    if sequence_seconds <= 0:
        return Request(math.inf, "sequences cost nothing: an infinite batch is asked for")
    return Request(math.sqrt(num_workers * noise_scale * fixed_seconds / sequence_seconds))


def _note(statistics: GradientStatistics) -> str | None:
    if statistics.squared_norm > 0:
        return None
    return "only noise was measured: an infinite batch is asked for"
