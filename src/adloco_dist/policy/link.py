"""H from the link: how many updates a round has where what averages cost is weighed against what they are worth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from adloco_dist.config import AlgorithmSettings, Settings

BUSY = 0.9
"""Share of a round in which averages may travel while updates are computed: a link that is always busy delays them."""
REMEMBERED = 5
"""Rounds whose median cost decides: a single one may have been interrupted."""
SAME = 1.2
"""Factor within which H stays as it is: measured seconds vary by so much."""
STEP = 2.0
"""Maximum factor by which H changes from one round to the next."""


@dataclass(frozen=True)
class RoundCost:
    """Where the time of a round went on the rank that waited least, in seconds: the others waited for it."""

    update_seconds: float
    """One update of each of the rank's workers."""
    exposed_seconds: float
    """Everything but updates and evaluations: averages, outer steps, statistics, report and plan."""
    transfer_seconds: float = 0.0
    """Time in which averages travelled while updates were computed, or were waited for after that."""

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


def updates_for_link(settings: Settings, costs: Sequence[RoundCost], last_updates: int) -> int:
    """H of the next round, where averages are exposed for `algorithm.exposed_share` of the time (docs/theory.md).

    Args:
        costs: of the last rounds, one after the other.
        last_updates: H of the last round.
    """
    wanted = last_updates if not costs else _wanted(settings.algorithm, costs)
    if last_updates / SAME < wanted < last_updates * SAME:
        wanted = last_updates
    return _bounded(settings, math.ceil(min(max(wanted, last_updates / STEP), last_updates * STEP)))


def first_updates(settings: Settings) -> int:
    """H of the first round."""
    return _bounded(settings, settings.algorithm.updates_per_round)


def _bounded(settings: Settings, updates: int) -> int:
    algorithm, wire = settings.algorithm, settings.wire
    least = max(algorithm.min_updates, wire.fragments * (wire.delay_updates + 1))
    return min(max(updates, least), max(algorithm.max_updates, least))


def remembered(costs: Sequence[RoundCost], latest: RoundCost | None) -> tuple[RoundCost, ...]:
    """The costs of the last rounds, with that of the latest, if it was measured."""
    return tuple([*costs, *([latest] if latest else [])][-REMEMBERED:])


def _wanted(algorithm: AlgorithmSettings, costs: Sequence[RoundCost]) -> float:
    update = median(cost.update_seconds for cost in costs)
    exposed = median(cost.exposed_seconds for cost in costs)
    transfer = median(cost.transfer_seconds for cost in costs)
    share = algorithm.exposed_share
    return max(exposed * (1 - share) / share, transfer / BUSY) / update
