"""How many updates each worker takes where ranks differ in speed (dynamic local updates, DyLU: 2401.09135)."""

from collections.abc import Mapping, Sequence

from adloco_dist.config import RoundLength
from adloco_dist.policy.layout import Layout

SAME = 0.95
"""Ranks that are faster than this, relative to the fastest, take as many updates: measured speeds vary by so much."""


def worker_updates(
    by: RoundLength, layout: Layout, updates: int, update_seconds: Sequence[float], growth: Mapping[int, float]
) -> dict[int, tuple[int, ...]]:
    """Updates of each worker, by trainer: in proportion to its rank's speed; none where all take `updates`.

    Args:
        update_seconds: time of one worker's update on every rank in the last round; 0, or none at all: not measured.
        growth: factors by which updates have become longer since, by trainer; 1 for one that is missing.
    """
    if by is not RoundLength.speed or not update_seconds:
        return {}
    lengths = [0.0] * len(update_seconds)
    for trainer, workers in layout.workers.items():
        for rank, *_ in workers:
            lengths[rank] += growth.get(trainer, 1.0)
    # One update of all of a rank's workers, which have their turns one after the other.
    turns = [seconds * length for seconds, length in zip(update_seconds, lengths, strict=True)]
    fastest = min((turn for turn in turns if turn > 0), default=0.0)
    speeds = [fastest / turn if turn > 0 else 1.0 for turn in turns]
    counts = [updates if speed >= SAME else max(1, int(updates * speed)) for speed in speeds]
    by_worker = {trainer: tuple(counts[ranks[0]] for ranks in layout.workers[trainer]) for trainer in layout.trainers}
    return by_worker if any(count != updates for counts in by_worker.values() for count in counts) else {}


def effective_workers(updates: Sequence[int]) -> float:
    """How many equal workers average as much noise away as these, who count for what they take: 1 / sum of p^2.

    The mean of gradients with weights p that add up to 1 has the variance of one times the sum of p^2.
    """
    return sum(updates) ** 2 / sum(count**2 for count in updates)
