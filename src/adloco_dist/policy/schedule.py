"""The inner learning rate: a function of the share of the budget that is spent, and of the workers that average."""

import math
from dataclasses import dataclass

from adloco_dist.config import InnerSettings, RateScaling, Schedule, Settings
from adloco_dist.policy.link import Rhythm

UPDATES_ON_ITS_OWN = 40.0
"""Updates for which workers are apart when each needs the rate of one alone: what averages take away later has no
part in the noise that a rate must bear meanwhile (docs/theory.md)."""
RATE_BY_WIDTH = 5e-3 * 128
"""Muon's best rate times the width of a model's matrices, where the rate decays at the end (docs/theory.md)."""
LEAST_WIDTH = 64.0
"""Of the narrowest model that was looked at: narrower ones have its rate."""
EVERY_UPDATE = Rhythm(updates=1, delay_updates=0)
"""The averages of data-parallel updates, whatever the length of their rounds."""


@dataclass(frozen=True)
class Progress:
    """Where a round's updates stand; every update of a round adds the same."""

    tokens_per_update: int
    fraction: float
    """Share of the budget that is spent before the round, in [0, 1]."""
    fraction_per_update: float


def rate_of_width(width: float) -> float:
    """Muon's peak rate for matrices of this mean width, in three digits."""
    return float(f"{RATE_BY_WIDTH / max(width, LEAST_WIDTH):.3g}")


def rate_share(inner: InnerSettings, progress: Progress, update: int) -> float:
    """The rate of update `update` (0-based) of the round, over its peak: linear warm-up times the schedule.

    The warm-up begins at a tenth: of a budget in seconds nobody knows in the first round what an update will spend.
    """
    done = progress.fraction + (update + 1) * progress.fraction_per_update
    warmup = min(1.0, max(0.1, done / inner.warmup_fraction)) if inner.warmup_fraction else 1.0
    left = max(0.0, 1 - progress.fraction - update * progress.fraction_per_update)
    match inner.schedule:
        case Schedule.constant:
            height = 1.0
        case Schedule.wsd:
            height = min(1.0, left / inner.decay_fraction)
        case Schedule.cosine:
            height = 0.5 * (1 - math.cos(math.pi * left))
    return warmup * (inner.final_lr_fraction + (1 - inner.final_lr_fraction) * height)


def rate_of_update(settings: Settings, num_workers: int, rhythm: Rhythm, progress: Progress, update: int) -> float:
    """The rate of update `update` (0-based) of a round, over the peak of one worker alone; of a trainer with so many
    workers."""
    averages = EVERY_UPDATE if settings.algorithm.is_data_parallel else rhythm
    scale = rate_scale(settings.inner.lr_scaling, workers_in_update(num_workers, averages))
    return rate_share(settings.inner, progress, update) * scale


def workers_in_update(num_workers: int, averages: Rhythm) -> float:
    """Workers whose mean gradient an update is as good as: all of them if they average at every update, one if they
    are apart for long."""
    apart = min(1.0, (averages.updates_apart - 1) / UPDATES_ON_ITS_OWN)
    return num_workers / (1 + (num_workers - 1) * apart)


def rate_scale(scaling: RateScaling, workers: float) -> float:
    """The rate's factor for the mean gradient of so many workers (sqrt for Adam: Malladi et al. 2022)."""
    factors = {RateScaling.none: 1.0, RateScaling.sqrt: math.sqrt(workers), RateScaling.linear: workers}
    return factors[scaling]
