"""Switch mode: how a worker's batch is taken by its device (AdLoCo 2508.18182, section 4.2; docs/theory.md)."""

import math
from dataclasses import dataclass

from adloco_dist.config import SwitchMode


@dataclass(frozen=True)
class Switched:
    """The local batch that updates really take."""

    batch: int
    mode: str
    """whole: as it was asked for, in one pass. clipped: to the batch limit. accumulated: in several passes."""


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


def automatic_n(batch: int, limit: int, noise_scale: float, pass_seconds: float, fixed_seconds: float) -> float:
    """The n that makes more progress per second: 1 where this batch should be accumulated, else just enough to clip.

    One update with x b_max sequences makes progress x / (x + phi) and takes x pass_seconds + fixed_seconds; against
    clipping (x = 1) that pays for x up to phi fixed_seconds / pass_seconds (derivation: docs/theory.md).

    Args:
        batch: local batch that was asked for, above `limit`.
        noise_scale: B_noise in sequences per worker: that of the trainer divided by its workers.
        pass_seconds: a pass of `limit` sequences.
        fixed_seconds: all that an update costs whatever its batch: the optimizer, its share of the outer step.
    """
    phi, multiple = noise_scale / limit, batch / limit
    pays = math.isinf(phi) or multiple * pass_seconds <= phi * fixed_seconds
    return 1.0 if pays else multiple


def pass_size(batch: int, capacity: int | None) -> int:
    """Sequences per pass for a batch in the fewest passes that `capacity` allows, all equal but the last.

    Examples:
        10 sequences with a capacity of 4 take passes of 4, 4 and 2; 9 take 3, 3 and 3.
    """
    num_passes = -(-batch // capacity) if capacity else 1
    return -(-batch // num_passes)


def least(*limits: int | None) -> int | None:
    """The smallest of the limits that exist."""
    return min((limit for limit in limits if limit is not None), default=None)
