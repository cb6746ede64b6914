"""What asks for a total batch, and what bounds the answer (design, section 3.2)."""

from dataclasses import dataclass

from adloco_dist.config import BatchingSettings, BatchRequest, GradientNorm
from adloco_dist.decisions.statistics import GradientStatistics, ratio


@dataclass(frozen=True)
class Request:
    """A total batch in sequences, a real number or infinity, and what there is to say about it."""

    sequences: float
    note: str | None = None


def variance_test_request(batching: BatchingSettings, measured: GradientStatistics) -> Request:
    """The total batch at which the averaged gradient passes the variance test.

    An averaged gradient of B sequences has variance tr(Sigma) / B. Norm test: Byrd et al. 2012; inner-product and
    augmented tests: Bollapragada, Byrd, Nocedal 2018; all as in AdLoCo (2508.18182), section 4.1.
    """
    is_plugin = batching.gradient_norm is GradientNorm.plugin
    squared_norm = measured.mean_squared_norm if is_plugin else measured.squared_norm
    norm_test = ratio(measured.trace, batching.eta**2 * squared_norm)
    noise_only = "only noise was measured: the test asks for an infinite batch" if squared_norm <= 0 else None
    if batching.request is BatchRequest.norm_test:
        return Request(norm_test, noise_only)
    if measured.ip_error > measured.ip_variance:
        return Request(norm_test, "inner products are lost in the sketch's error: the norm test decides")
    # Squared only above zero: a negative norm is noise alone, not a small denominator.
    inner_product_test = ratio(measured.ip_variance, (batching.theta * max(0.0, measured.ip_squared_norm)) ** 2)
    if batching.request is BatchRequest.inner_product_test:
        return Request(inner_product_test, noise_only)
    across = ratio(measured.orthogonal_variance, batching.nu**2 * squared_norm)
    return Request(max(inner_product_test, across), noise_only)


def staged_request(batching: BatchingSettings, fraction: float) -> float:
    """The total batch of the stage that `fraction` of the budget has reached."""
    stages = zip(batching.stage_fractions, batching.stage_batches, strict=True)
    return float([batch for begin, batch in stages if begin <= fraction][-1])


LEAST_MEASURABLE = 2.0
"""Sequences without which a trainer has no two gradients to compare."""


def bound_change(batching: BatchingSettings, request: float, last: float) -> tuple[float, str | None]:
    """What a test may change in one round: at most `growth_limit` upwards, downwards only if it may shrink.

    It never shrinks a batch to where nothing can be measured: nothing would let it grow again.

    Args:
        last: the last round's request, after its bounds.

    Returns:
        The total batch, and the setting that changed it, or `measurable`.
    """
    if request > batching.growth_limit * last:
        return batching.growth_limit * last, "growth_limit"
    if request < last and not batching.may_shrink:
        return last, "may_shrink"
    if request < LEAST_MEASURABLE <= last:
        return LEAST_MEASURABLE, "measurable"
    return request, None


def bound_size(batching: BatchingSettings, request: float, shard_sequences: int | None) -> tuple[float, str | None]:
    """The least and the largest total batch of any request.

    Args:
        shard_sequences: sequences of one epoch of the trainer's shard, of which an update takes none twice; None:
            not bounded by a shard.
    """
    size, bound = request, None
    if size < batching.least_batch:
        size, bound = float(batching.least_batch), "least_batch"
    if batching.largest_batch is not None and size > batching.largest_batch:
        size, bound = float(batching.largest_batch), "largest_batch"
    if shard_sequences is not None and size > shard_sequences:
        size, bound = float(shard_sequences), "shard"
    return size, bound
