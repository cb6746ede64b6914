"""Switch mode: how a worker's batch is taken by its device (AdLoCo 2508.18182, section 4.2; docs/theory.md)."""

import math
from dataclasses import dataclass

from adloco_dist.config import SwitchMode


@dataclass(frozen=True)
class Switched:
    """The local batch that updates really take."""

    batch: int
    mode: str
    """whole: as asked for, in one micro-batch. clipped: to the batch limit. accumulated: in several micro-batches."""


def switch(batch: int, limit: int | None, mode: SwitchMode, n: float) -> Switched:
    """Take a local batch whole up to the batch limit b_max, clip it up to n b_max, accumulate it above.

    Args:
        batch: sequences that were asked for.
        limit: b_max; None: any batch is taken whole.
        mode: `accumulate` never clips, `clip` never accumulates.
    """
    if limit is None or batch <= limit:
        return Switched(batch, "whole")
    if mode is SwitchMode.clip or (mode is SwitchMode.threshold and batch <= n * limit):
        return Switched(limit, "clipped")
    return Switched(batch, "accumulated")


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


def micro_batch_size(batch: int, capacity: int | None) -> int:
    """Sequences per micro-batch for a batch in as few as `capacity` allows, all equal but the last.

    Examples:
        10 sequences with a capacity of 4 take micro-batches of 4, 4 and 2; 9 take 3, 3 and 3.
    """
    num_micro_batches = -(-batch // capacity) if capacity else 1
    return -(-batch // num_micro_batches)


def min_limit(*limits: int | None) -> int | None:
    """The smallest of the limits that exist."""
    return min((limit for limit in limits if limit is not None), default=None)
