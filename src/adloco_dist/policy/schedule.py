"""The inner learning rate as a function of the share of the budget that is spent."""

import math
from dataclasses import dataclass

from adloco_dist.config import InnerSettings, RateScaling, Schedule


@dataclass(frozen=True)
class Progress:
    """Where a round's updates stand; every update of a round adds the same."""

    tokens_per_update: int
    fraction: float
    """Share of the budget that is spent before the round, in [0, 1]."""
    fraction_per_update: float


def learning_rate(inner: InnerSettings, progress: Progress, update: int) -> float:
    """The rate of update `update` (0-based) of the round: linear warm-up, then constant or cosine decay.

    Both factors multiply, as is usual for a short warm-up. It begins at a tenth: of a budget in seconds nobody knows
    in the first round what an update will spend.
    """
    done = progress.fraction + (update + 1) * progress.fraction_per_update
    warmup = min(1.0, max(0.1, done / inner.warmup_fraction)) if inner.warmup_fraction else 1.0
    if inner.schedule is Schedule.constant:
        return inner.lr * warmup
    fraction = min(1.0, progress.fraction + update * progress.fraction_per_update)
    floor = inner.final_lr_fraction
    return inner.lr * warmup * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fraction)))


def batch_scale(scaling: RateScaling, multiple: float) -> float:
    """The rate's factor for that multiple of the first local batch (sqrt for Adam: Malladi et al. 2022)."""
    factors = {RateScaling.none: 1.0, RateScaling.sqrt: math.sqrt(multiple), RateScaling.linear: multiple}
    return factors[scaling]
