"""What a test asks for, what bounds the answer, and how a device takes it (docs/theory.md, "What bounds it")."""

import math
from dataclasses import replace

from adloco_dist.config import BatchingSettings, BatchRequest, GradientNorm
from adloco_dist.noise.requests import Request, augmented_inner_product_test, inner_product_test, norm_test
from adloco_dist.noise.statistics import GradientStatistics

MIN_MEASURABLE = 2.0
"""Sequences without which a trainer has no two gradients to compare."""
WHOLE, CLIPPED, ACCUMULATED = "whole", "clipped", "accumulated"
"""How a worker's batch is taken: in one micro-batch; cut to the batch limit; in several micro-batches."""


def variance_test_request(batching: BatchingSettings, measured: GradientStatistics) -> Request:
    """The total batch at which the averaged gradient passes the test that the settings name.

    Where inner products were not resolved, the norm test takes the place of a test that needs them.
    """
    if batching.gradient_norm is GradientNorm.plugin:
        measured = measured.as_measured()
    by_norm = norm_test(measured, batching.eta)
    if batching.request is BatchRequest.norm_test:
        return by_norm
    if not measured.resolves_inner_products:
        return replace(by_norm, note="inner products are lost in the sketch's error: the norm test decides")
    if batching.request is BatchRequest.inner_product_test:
        return inner_product_test(measured, batching.theta)
    assert batching.request is BatchRequest.augmented_inner_product_test
    return augmented_inner_product_test(measured, batching.theta, batching.nu)


def bound_change(batching: BatchingSettings, request: float, last: float) -> tuple[float, str | None]:
    """What a test may make of the last round's bounded request in one round: `growth_limit` bounds growth,
    `shrink_limit` shrinking. A batch never shrinks to where nothing can be measured: nothing would let it grow again.
    Returns the total batch, and the setting that changed it, or `measurable`."""
    bound = None
    if request > batching.growth_limit * last:
        return batching.growth_limit * last, "growth_limit"
    if request < last / batching.shrink_limit:
        request, bound = last / batching.shrink_limit, "shrink_limit"
    if request < MIN_MEASURABLE <= last:
        return MIN_MEASURABLE, "measurable"
    return request, bound


def bound_size(
    batching: BatchingSettings, request: float, num_workers: int, shard_sequences: int | None
) -> tuple[float, str | None]:
    """Bound a request from below and above: an update takes no sequence of the shard, if its size is known, twice."""
    size, bound, least = request, None, batching.min_batch
    if least is None:
        # An update's fixed costs make smaller batches dear.
        least = num_workers * batching.local_batch if batching.measures_gradients else 1
    if size < least:
        size, bound = float(least), "min_batch"
    if batching.max_batch is not None and size > batching.max_batch:
        size, bound = float(batching.max_batch), "max_batch"
    if shard_sequences is not None and size > shard_sequences:
        size, bound = float(shard_sequences), "shard"
    return size, bound


def switch(batch: int, limit: int | None, n: float | None) -> tuple[int, str]:
    """Switch mode: take a local batch whole up to the limit b_max, clip it up to n b_max, accumulate it above.

    AdLoCo 2508.18182, section 4.2; docs/theory.md. Without a limit any batch is taken whole; n = 1 never clips, None
    always does. Returns the local batch that updates really take, and how.
    """
    if limit is None or batch <= limit:
        return batch, WHOLE
    if n is None or batch <= n * limit:
        return limit, CLIPPED
    return batch, ACCUMULATED


def automatic_n(batch: int, limit: int, noise_scale: float, micro_batch_seconds: float, fixed_seconds: float) -> float:
    """The n that makes more progress per second: 1 where this batch should be accumulated, else just enough to clip.

    One update with x b_max sequences makes progress x / (x + phi) and takes x micro_batch_seconds + fixed_seconds;
    against clipping (x = 1) that pays for x up to phi fixed_seconds / micro_batch_seconds (derivation: docs/theory.md).

    Args:
        batch: local batch that was asked for, above `limit`.
        noise_scale: B_noise in sequences per worker: that of the trainer divided by its workers.
        micro_batch_seconds: time of a micro-batch of `limit` sequences.
        fixed_seconds: all that an update costs whatever its batch: the optimizer, its share of the outer step.
    """
    phi, multiple = noise_scale / limit, batch / limit
    pays = math.isinf(phi) or multiple * micro_batch_seconds <= phi * fixed_seconds
    return 1.0 if pays else multiple
