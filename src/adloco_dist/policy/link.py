"""H and the delay from the link: what averages cost is weighed against what workers lose by drifting apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from adloco_dist.config import AlgorithmSettings, Settings

REMEMBERED = 5
"""Rounds whose median cost decides: a single one may have been interrupted."""
GAIN = 0.005
"""Share of the time that a change must promise to save: H stays as it is within a factor of 1.3."""
STEP = 2.0
"""Maximum factor by which H changes from one round to the next."""


@dataclass(frozen=True)
class Rhythm:
    """How the averages of a round are spread in time."""

    updates: int
    """H."""
    delay_updates: int
    """tau: updates that are computed while one of them travels."""


@dataclass(frozen=True)
class RoundCost:
    """Where the time of a round went on the rank that waited least, in seconds: the others waited for it."""

    update_seconds: float
    """One update of each of the rank's workers."""
    exposed_seconds: float
    """Averages, outer steps, report and plan: what comes once a round. Gradients are measured once in so many updates,
    whatever the rounds."""
    transfer_seconds: float = 0.0
    """Time in which averages travelled while updates were computed, or were waited for after that."""
    wait_seconds: float = 0.0
    """Time of that in which the rank waited for them, which is exposed."""

    def exposed_share(self, updates: int) -> float:
        """Share of a round of so many updates that is spent otherwise."""
        return self.exposed_seconds / (self.exposed_seconds + updates * self.update_seconds)


def worth_of_averaging(exposed_share: float, num_workers: int, local_batch: int, noise_scale: float) -> float:
    """Progress per second over that of one worker alone with the same batch, at most (docs/theory.md).

    Workers are taken to lose nothing by averaging only now and then.

    Args:
        noise_scale: in sequences; infinite where it is not known, for the most that averaging can be worth.
    """
    gain = num_workers
    if noise_scale < math.inf:
        gain = (1 + noise_scale / local_batch) / (1 + noise_scale / (num_workers * local_batch))
    return (1 - exposed_share) * gain


def first_rhythm(settings: Settings) -> Rhythm:
    """The first round's, before anything was measured."""
    return _bounded(settings, settings.algorithm.updates_per_round, settings.wire.delay_updates or 0)


def rhythm_for_link(settings: Settings, costs: Sequence[RoundCost], last: Rhythm) -> Rhythm:
    """The next round's, with which the time to a loss is the shortest (docs/theory.md).

    Args:
        costs: of the last rounds, one after the other.
        last: the last round's.
    """
    if not costs:
        return last
    cost, best = _Typical.of(costs, settings.wire.fragments), best_rhythm(settings, costs)
    if cost.time(settings.algorithm, best) > (1 - GAIN) * cost.time(settings.algorithm, last):
        best = last
    updates = math.ceil(min(max(best.updates, last.updates / STEP), last.updates * STEP))
    return _bounded(settings, updates, best.delay_updates)


def best_rhythm(settings: Settings, costs: Sequence[RoundCost]) -> Rhythm:
    """Where rounds of such costs settle."""
    algorithm, fragments, delay = settings.algorithm, settings.wire.fragments, settings.wire.delay_updates
    cost = _Typical.of(costs, fragments)
    longest = max(1, min(math.ceil(cost.transfer), algorithm.max_updates // fragments - 1))
    candidates = (
        _bounded(settings, max(math.ceil(cost.best_updates(algorithm, one)), fragments * (one + 1)), one)
        for one in (range(1, longest + 1) if delay is None else (delay,))
    )
    return min(candidates, key=lambda rhythm: cost.time(algorithm, rhythm))


def remembered(costs: Sequence[RoundCost], latest: RoundCost | None) -> tuple[RoundCost, ...]:
    """The costs of the last rounds, with that of the latest, if it was measured."""
    return tuple([*costs, *([latest] if latest else [])][-REMEMBERED:])


@dataclass(frozen=True)
class _Typical:
    """What a round costs, by its medians; all in updates."""

    fixed: float
    """What is exposed whatever the delay."""
    transfer: float
    """The time that one fragment travels."""
    fragments: int

    @classmethod
    def of(cls, costs: Sequence[RoundCost], fragments: int) -> "_Typical":
        update = median(cost.update_seconds for cost in costs)
        fixed = median(cost.exposed_seconds - cost.wait_seconds for cost in costs)
        transfer = median(cost.transfer_seconds for cost in costs)
        return cls(fixed / update, transfer / fragments / update, fragments)

    def exposed(self, delay_updates: int) -> float:
        return self.fixed + self.fragments * max(0.0, self.transfer - delay_updates)

    def time(self, algorithm: AlgorithmSettings, rhythm: Rhythm) -> float:
        """The time to a loss, in proportion."""
        apart = rhythm.updates + 2 * rhythm.delay_updates
        return apart**algorithm.exposed_share * (1 + self.exposed(rhythm.delay_updates) / rhythm.updates)

    def best_updates(self, algorithm: AlgorithmSettings, delay_updates: int) -> float:
        """H with which that is the shortest for a delay: the root of its derivative."""
        share, exposed = algorithm.exposed_share, self.exposed(delay_updates)
        linear = (1 - share) * exposed
        return (linear + math.sqrt(linear**2 + 8 * share * exposed * delay_updates)) / (2 * share)


def _bounded(settings: Settings, updates: int, delay_updates: int) -> Rhythm:
    """A round within the settings' bounds, in which every fragment has its delay."""
    algorithm, fragments, fixed = settings.algorithm, settings.wire.fragments, settings.wire.delay_updates
    least = max(algorithm.min_updates, fragments * ((1 if fixed is None else fixed) + 1))
    updates = min(max(updates, least), max(algorithm.max_updates, least))
    if fixed is not None:
        return Rhythm(updates, fixed)
    return Rhythm(updates, max(1, min(delay_updates, updates // fragments - 1)))
