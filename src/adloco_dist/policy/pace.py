"""How many updates each worker takes where ranks differ in speed (dynamic local updates, DyLU: 2401.09135)."""

from collections.abc import Sequence

from adloco_dist.config import RoundLength, Settings
from adloco_dist.policy.layout import Layout

SAME = 0.95
"""Ranks that are faster than this, relative to the fastest, take as many updates: measured speeds vary by so much."""


def worker_updates(
    settings: Settings, layout: Layout, updates: int, update_seconds: Sequence[float]
) -> dict[int, tuple[int, ...]]:
    """Updates of each worker, by trainer: in proportion to its rank's speed; none where all take `updates`.

    Args:
        update_seconds: time of one worker's update on every rank; 0, or nothing at all: not measured.
    """
    if settings.algorithm.round is not RoundLength.speed or not update_seconds:
        return {}
    # A rank's workers have their turns one after the other.
    seconds = {
        rank: update_seconds[rank] * sum(len(layout.workers_on(rank, one)) for one in layout.trainers_on(rank))
        for rank in range(len(update_seconds))
    }
    fastest = min((one for one in seconds.values() if one > 0), default=0.0)
    counts = {rank: _count(updates, fastest / one if one > 0 else 1.0) for rank, one in seconds.items()}
    by_worker = {trainer: tuple(counts[ranks[0]] for ranks in layout.workers[trainer]) for trainer in layout.trainers}
    return by_worker if any(count != updates for counts_of in by_worker.values() for count in counts_of) else {}


def _count(updates: int, speed: float) -> int:
    return updates if speed >= SAME else max(1, int(updates * speed))
