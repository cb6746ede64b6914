"""How many updates each worker takes where ranks differ in speed (dynamic local updates, DyLU: 2401.09135)."""

from collections.abc import Mapping, Sequence

from adloco_dist.config import Settings
from adloco_dist.policy.layout import Layout

SAME = 0.95
"""Ranks that are faster than this, relative to the fastest, take as many updates: measured speeds vary by so much."""
FIRST_UPDATES = 5
"""Of a round that is to take a number of seconds, before speeds have been measured."""


def max_updates(
    settings: Settings, layout: Layout, update_seconds: Sequence[float], growth: Mapping[int, float]
) -> int:
    """H, the updates of the fastest workers: with round=seconds as many as they take in that time.

    Args:
        update_seconds: time of one worker's update on every rank in the last round; 0, or none at all: not measured.
        growth: factors by which updates have become longer since, by trainer; 1 for one that is missing.
    """
    algorithm = settings.algorithm
    if algorithm.round_seconds is None:
        return algorithm.updates_per_round
    fastest = min((one for one in _turns(layout, update_seconds, growth).values() if one > 0), default=0.0)
    wanted = int(algorithm.round_seconds / fastest) if fastest else FIRST_UPDATES
    return min(max(1, wanted), algorithm.updates_per_round)


def worker_updates(
    settings: Settings, layout: Layout, updates: int, update_seconds: Sequence[float], growth: Mapping[int, float]
) -> dict[int, tuple[int, ...]]:
    """Updates of each worker, by trainer: in proportion to its rank's speed; none where all take `updates`.

    Args:
        update_seconds, growth: as in `max_updates`.
    """
    if not settings.algorithm.round.is_unequal or not update_seconds:
        return {}
    seconds = _turns(layout, update_seconds, growth)
    fastest = min((one for one in seconds.values() if one > 0), default=0.0)
    counts = {rank: _count(updates, fastest / one if one > 0 else 1.0) for rank, one in seconds.items()}
    by_worker = {trainer: tuple(counts[ranks[0]] for ranks in layout.workers[trainer]) for trainer in layout.trainers}
    return by_worker if any(count != updates for counts_of in by_worker.values() for count in counts_of) else {}


def effective_workers(updates: Sequence[int]) -> float:
    """How many equal workers average as much noise away as these, who count for what they take: 1 / sum of p^2.

    The mean of gradients with weights p that add up to 1 has the variance of one times the sum of p^2.
    """
    return sum(updates) ** 2 / sum(count**2 for count in updates)


def _turns(layout: Layout, update_seconds: Sequence[float], growth: Mapping[int, float]) -> dict[int, float]:
    """Time of one update of all of a rank's workers, by rank: they have their turns one after the other."""
    return {
        rank: seconds
        * sum(len(layout.workers_on(rank, one)) * growth.get(one, 1.0) for one in layout.trainers_on(rank))
        for rank, seconds in enumerate(update_seconds)
    }


def _count(updates: int, speed: float) -> int:
    return updates if speed >= SAME else max(1, int(updates * speed))
