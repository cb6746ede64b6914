"""The inner learning rate as a function of progress, counted in tokens of the whole pool."""

import math
from dataclasses import dataclass

from adloco_dist.config import InnerSettings, RateScaling, Schedule, Settings


@dataclass(frozen=True)
class Progress:
    """Where a round's updates stand; every update of a round adds the same.

    `fraction` is the share of the budget that is spent, in [0, 1].
    """

    tokens: int
    tokens_per_update: int
    fraction: float
    fraction_per_update: float


def learning_rate(inner: InnerSettings, progress: Progress, update: int) -> float:
    """The rate of update `update` (0-based) of the round: linear warm-up, then constant or cosine decay.

    Warm-up counts the tokens that the update completes, so the first rate is not zero; the decay starts where
    the warm-up ends only in so far as both factors multiply, as is usual for a short warm-up.
    """
    tokens_done = progress.tokens + (update + 1) * progress.tokens_per_update
    warmup = min(1.0, tokens_done / inner.warmup_tokens) if inner.warmup_tokens else 1.0
    if inner.schedule is Schedule.constant:
        return inner.lr * warmup
    fraction = min(1.0, progress.fraction + update * progress.fraction_per_update)
    floor = inner.final_lr_fraction
    return inner.lr * warmup * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fraction)))


def batch_scale(settings: Settings, local_batch: int) -> float:
    """The factor by which the rate follows the local batch in use (sqrt for Adam: Malladi et al. 2022)."""
    multiple = local_batch / (settings.inner.reference_batch or settings.batching.local_batch)
    match settings.inner.batch_scaling:
        case RateScaling.none:
            return 1.0
        case RateScaling.sqrt:
            return math.sqrt(multiple)
        case RateScaling.linear:
            return multiple
