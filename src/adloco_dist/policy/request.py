"""What asks for a total batch by the settings, and what bounds the answer (docs/theory.md, "What bounds it")."""

from dataclasses import replace

from adloco_dist.config import MEASURED_REQUESTS, BatchingSettings, BatchRequest, GradientNorm
from adloco_dist.noise.requests import Request, augmented_inner_product_test, inner_product_test, norm_test
from adloco_dist.noise.statistics import GradientStatistics


def variance_test_request(batching: BatchingSettings, measured: GradientStatistics) -> Request:
    """The total batch at which the averaged gradient passes the test that the settings name.

    Where inner products were not resolved, the norm test takes the place of a test that needs them.
    """
    if batching.gradient_norm is GradientNorm.plugin:
        measured = measured.as_measured()
    by_norm = norm_test(measured, batching.eta)
    match batching.request:
        case BatchRequest.norm_test:
            return by_norm
        case BatchRequest.inner_product_test:
            request = inner_product_test(measured, batching.theta)
        case BatchRequest.augmented_inner_product_test:
            request = augmented_inner_product_test(measured, batching.theta, batching.nu)
        case BatchRequest.progress | BatchRequest.none | BatchRequest.ramp | BatchRequest.staged | BatchRequest.replay:
            raise AssertionError(f"batching.request={batching.request.name} tests no gradients")
    if measured.resolves_inner_products:
        return request
    return replace(by_norm, note="inner products are lost in the sketch's error: the norm test decides")


def staged_request(batching: BatchingSettings, fraction: float) -> float:
    """The total batch of the stage that `fraction` of the budget has reached."""
    stages = zip(batching.stage_fractions, batching.stage_batches, strict=True)
    return float([batch for begin, batch in stages if begin <= fraction][-1])


MIN_MEASURABLE = 2.0
"""Sequences without which a trainer has no two gradients to compare."""


def bound_change(batching: BatchingSettings, request: float, last: float) -> tuple[float, str | None]:
    """What a test may change in one round: `growth_limit` bounds growth, and `shrink_limit` what may shrink.

    It never shrinks a batch to where nothing can be measured: nothing would let it grow again.

    Args:
        last: the last round's request, after its bounds.

    Returns:
        The total batch, and the setting that changed it, or `measurable`.
    """
    bound = None
    if request > batching.growth_limit * last:
        return batching.growth_limit * last, "growth_limit"
    if request < last and not batching.may_shrink:
        return last, "may_shrink"
    if request < last / batching.shrink_limit:
        request, bound = last / batching.shrink_limit, "shrink_limit"
    if request < MIN_MEASURABLE <= last:
        return MIN_MEASURABLE, "measurable"
    return request, bound


def bound_size(
    batching: BatchingSettings, request: float, num_workers: int, shard_sequences: int | None
) -> tuple[float, str | None]:
    """Bound a request from below and above, whatever asks for it.

    Args:
        shard_sequences: sequences of one epoch of the trainer's shard, of which an update takes none twice; None:
            not bounded by a shard.
    """
    size, bound, least = request, None, batching.min_batch
    if least is None:
        # An update's fixed costs make smaller batches dear, and rates that follow the batch make their updates small.
        least = num_workers * batching.local_batch if batching.request in MEASURED_REQUESTS else 1
    if size < least:
        size, bound = float(least), "min_batch"
    if batching.max_batch is not None and size > batching.max_batch:
        size, bound = float(batching.max_batch), "max_batch"
    if shard_sequences is not None and size > shard_sequences:
        size, bound = float(shard_sequences), "shard"
    return size, bound
