"""How many updates a round has, and what travels: what averages cost is weighed against what workers lose by it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from adloco_dist.config import AlgorithmSettings, RoundLength, WireFormat, WireSettings
from adloco_dist.policy.layout import Layout

EXPOSED_SHARE = 0.2
"""Exponent with which updates that workers are apart count against the time that averages expose: the share of a round
that all else but updates takes where H settles, whatever the link (docs/theory.md)."""
DRIFT_POWER = 0.12
"""Exponent with which the updates to a loss grow with those for which workers are apart, as measured with Muon:
`worth`, which is a bound, counts no more than that (docs/theory.md)."""
SIGNS_COST = 1.1
"""Factor of the time to a loss where signs travel alone, and what they leave waits (docs/theory.md)."""
AT_ONCE = 0.1
"""Share of an update that an average may take for workers to wait for it: about what a delay of one update costs two
workers, and less than it costs more of them (docs/theory.md)."""
FOUR_BITS_RATIO = 4.125 / 1.125
"""What a host sends of elements in 4 bits over what it sends of their signs, with the scales of blocks."""
REMEMBERED = 5
"""Rounds whose median cost decides: a single one may have been interrupted."""
GAIN = 0.005
"""Share of the time that a change must promise to save: H stays as it is within a factor of 1.3."""
STEP = 2.0
"""Maximum factor by which H changes from one round to the next."""
ROUNDS_OF_A_SPEED = 3
"""Rounds that tell how fast ranks are: the median of fewer may be an interrupted one."""
SAME = 0.95
"""Ranks that are faster than this, relative to the fastest, take as many updates: measured speeds vary by so much. To
slower ones as much is allowed: one that is late holds all others up, one that is early waits alone."""


@dataclass(frozen=True)
class Rhythm:
    """How the averages of a round are spread in time."""

    updates: int
    """H."""
    delay_updates: int
    """tau: updates that are computed while one of them travels."""
    in_four_bits: bool = False
    """Whether 4 bits of each element travel, with wire.format=adaptive, and not its sign alone."""

    @property
    def updates_apart(self) -> int:
        """H + 2 tau: the length of rounds without a delay that leave workers apart for as long (docs/theory.md)."""
        return self.updates + 2 * self.delay_updates


@dataclass(frozen=True)
class RoundCost:
    """Where the time of a round went on the rank that waited least, in seconds: the others waited for it."""

    update_seconds: float
    """One update of each of the rank's workers."""
    exposed_seconds: float
    """Averages, outer steps, report and plan: what comes once a round, as measuring gradients does not."""
    transfer_seconds: float = 0.0
    """Time in which averages travelled while updates were computed, or were waited for after that."""
    wait_seconds: float = 0.0
    """Time of that in which the rank waited for them, which is exposed."""
    four_bits_share: float = 0.0
    """Share of the averages that arrived in which 4 bits of each element had travelled, with wire.format=adaptive, and
    not its sign alone."""
    turn_seconds: tuple[float, ...] = ()
    """By rank, one update of each of its workers; 0 where there is none. None at all: ranks are others now."""

    def seconds(self, updates: int) -> float:
        """A round of so many updates."""
        return self.exposed_seconds + updates * self.update_seconds

    def exposed_share(self, updates: int) -> float:
        """Share of a round of so many updates that is spent otherwise."""
        return self.exposed_seconds / self.seconds(updates)


def over_signs(four_bits_share: float) -> float:
    """What averages send of which a share goes in 4 bits, over what they send of signs alone."""
    return 1 + four_bits_share * (FOUR_BITS_RATIO - 1)


def drift_factor(rhythm: Rhythm) -> float:
    """Updates that a loss takes in such rounds over those in rounds of two without a delay (docs/theory.md)."""
    return max(1.0, rhythm.updates_apart / 2) ** DRIFT_POWER


def worth_of_averaging(useful_share: float, num_workers: float, local_batch: int, noise_scale: float) -> float:
    """Progress per second over that of one worker alone with the same batch, at most (docs/theory.md).

    Args:
        useful_share: of the time, what updates take, over the factor by which they are more as workers drift apart.
        num_workers: of unequal ones, how many of the fastest they are as good as.
        noise_scale: in sequences, infinite if unknown.
    """
    gain = num_workers
    if noise_scale < math.inf:
        gain = (1 + noise_scale / local_batch) / (1 + noise_scale / (num_workers * local_batch))
    return useful_share * gain


def first_rhythm(algorithm: AlgorithmSettings, wire: WireSettings) -> Rhythm:
    """The rhythm of the first round, before anything was measured; of every round that does not follow the link."""
    delay = 1 if wire.delay_updates is None else wire.delay_updates  # a link that nobody knows may be slow
    first = Rhythm(algorithm.updates_per_round, delay)
    return first if algorithm.round is not RoundLength.link else _bounded(algorithm, wire, first.updates, first)


def rhythm_for_link(
    algorithm: AlgorithmSettings, wire: WireSettings, costs: Sequence[RoundCost], last: Rhythm
) -> Rhythm:
    """The next round's rhythm, with which the time to a loss is the shortest (docs/theory.md); `costs` are those of the
    last rounds, `last` the rhythm of the last."""
    if not costs:
        return last
    cost, best = _Typical.of(costs, wire), best_rhythm(algorithm, wire, costs)
    may_stay = last.delay_updates > 0 or wire.delay_updates is not None or cost.is_quick(last.in_four_bits)
    if may_stay and cost.time(best) > (1 - GAIN) * cost.time(last):
        best = last
    updates = math.ceil(min(max(best.updates, last.updates / STEP), last.updates * STEP))
    return _bounded(algorithm, wire, updates, best, cost.slowest)


def best_rhythm(algorithm: AlgorithmSettings, wire: WireSettings, costs: Sequence[RoundCost]) -> Rhythm:
    """Where rounds of such costs settle."""
    fragments, fixed = wire.fragments, wire.delay_updates
    cost, (_, max_updates) = _Typical.of(costs, wire), algorithm.updates_range
    candidates: list[Rhythm] = []
    for in_four_bits in (False, True) if wire.format is WireFormat.adaptive else (False,):
        for delay in cost.delays(in_four_bits, max_updates // fragments - 1) if fixed is None else (fixed,):
            updates = max(math.ceil(cost.best_updates(delay, in_four_bits)), fragments * (delay + 1))
            candidates.append(_bounded(algorithm, wire, updates, Rhythm(updates, delay, in_four_bits), cost.slowest))
    return min(candidates, key=cost.time)


def remembered(costs: Sequence[RoundCost], latest: RoundCost | None) -> tuple[RoundCost, ...]:
    """The costs of the last rounds, with that of the latest, if it was measured."""
    return tuple([*costs, *([latest] if latest else [])][-REMEMBERED:])


def worker_speeds(layout: Layout, costs: Sequence[RoundCost]) -> dict[int, tuple[float, ...]]:
    """The speed of each worker over that of the fastest, by trainer; none where ranks are about as fast. `costs` are
    those of the last rounds, in which workers lay where they do now; those of one rank take turns."""
    of_rank = [SAME / factor if factor > 1 else 1.0 for factor in _slowness(costs)]
    if not of_rank or min(of_rank) == 1:
        return {}
    return {trainer: tuple(of_rank[ranks[0]] for ranks in layout.workers[trainer]) for trainer in layout.trainers}


def worker_updates(updates: int, speeds: Sequence[float], owed: Sequence[float]) -> tuple[list[int], list[float]]:
    """Updates of a trainer's workers in proportion to their speeds (dynamic local updates, DyLU: 2401.09135), at least
    one each; and the parts of updates that they could have taken beside them, which count in the next round as `owed`
    do in this."""
    wanted = [updates * speed + part for speed, part in zip(speeds, owed, strict=True)]
    counts = [min(max(1, int(amount)), updates) for amount in wanted]
    return counts, [min(max(0.0, amount - count), 1.0) for amount, count in zip(wanted, counts, strict=True)]


def _slowness(costs: Sequence[RoundCost]) -> list[float]:
    """By rank, how many times as long as on the fastest an update of all its workers takes; 1 for those that are about
    as fast. None at all: it was not measured often enough."""
    rounds = [cost.turn_seconds for cost in costs if cost.turn_seconds]
    if len(rounds) < ROUNDS_OF_A_SPEED:
        return []
    fastest = [min(filter(None, seconds)) for seconds in rounds]
    factors = [
        median(seconds[rank] / least if seconds[rank] else 1.0 for seconds, least in zip(rounds, fastest, strict=True))
        for rank in range(len(rounds[0]))
    ]
    return [factor if factor * SAME > 1 else 1.0 for factor in factors]


def effective_workers(speeds: Sequence[float]) -> float:
    """How many equal workers average as much noise away as these, which count for what they take: 1 / sum of p^2, since
    the mean of gradients with weights p that add up to 1 has the variance of one times the sum of p^2."""
    return sum(speeds) ** 2 / sum(speed**2 for speed in speeds)


@dataclass(frozen=True)
class _Typical:
    """What a round costs, by its medians; all in updates."""

    fixed: float
    """What is exposed whatever the delay."""
    signs_transfer: float
    """The time that one fragment travels, with wire.format=adaptive if its signs travel alone."""
    fragments: int
    slowest: float
    """How many times as long as the fastest the slowest rank takes for an update."""
    is_adaptive: bool
    """Whether the format follows the link."""

    @classmethod
    def of(cls, costs: Sequence[RoundCost], wire: WireSettings) -> "_Typical":
        update = median(cost.update_seconds for cost in costs)
        fixed = median(cost.exposed_seconds - cost.wait_seconds for cost in costs)
        transfer = median(cost.transfer_seconds / over_signs(cost.four_bits_share) for cost in costs)
        return cls(
            fixed / update,
            transfer / wire.fragments / update,
            wire.fragments,
            max(_slowness(costs), default=1.0),
            wire.format is WireFormat.adaptive,
        )

    def transfer(self, in_four_bits: bool) -> float:
        return self.signs_transfer * over_signs(in_four_bits)

    def is_quick(self, in_four_bits: bool) -> bool:
        """Whether to wait for averages costs less than a delay does. Signs that are waited for are no better than 4
        bits that come late; and how quick 4 bits are is known once they have travelled."""
        is_worth_it = in_four_bits or not self.is_adaptive
        return is_worth_it and self.fragments * self.transfer(in_four_bits) <= AT_ONCE

    def delays(self, in_four_bits: bool, longest: int) -> range:
        """The delays that are worth a look."""
        if self.is_quick(in_four_bits):
            return range(1)
        return range(1, max(1, min(math.ceil(self.transfer(in_four_bits)), longest)) + 1)

    def exposed(self, delay_updates: int, in_four_bits: bool) -> float:
        return self.fixed + self.fragments * max(0.0, self.transfer(in_four_bits) - delay_updates)

    def time(self, rhythm: Rhythm) -> float:
        """The time to a loss, in proportion."""
        delay, in_four_bits = rhythm.delay_updates, rhythm.in_four_bits
        waiting = 1 + self.exposed(delay, in_four_bits) / rhythm.updates
        return rhythm.updates_apart**EXPOSED_SHARE * waiting * (1.0 if in_four_bits else SIGNS_COST)

    def best_updates(self, delay_updates: int, in_four_bits: bool) -> float:
        """H with which that is the shortest for a delay: the root of its derivative."""
        share, exposed = EXPOSED_SHARE, self.exposed(delay_updates, in_four_bits)
        linear = (1 - share) * exposed
        return (linear + math.sqrt(linear**2 + 8 * share * exposed * delay_updates)) / (2 * share)


def _bounded(
    algorithm: AlgorithmSettings, wire: WireSettings, updates: int, wanted: Rhythm, slowest: float = 1.0
) -> Rhythm:
    """A round of so many updates, within the settings' bounds, in which every fragment has its delay, and the slowest
    rank the time for an update."""
    fragments, fixed = wire.fragments, wire.delay_updates
    smallest, largest = algorithm.updates_range
    smallest = max(smallest, fragments * ((fixed or 0) + 1), min(math.ceil(slowest), largest))
    updates = min(max(updates, smallest), max(largest, smallest))
    delay = min(wanted.delay_updates, updates // fragments - 1) if fixed is None else fixed
    return Rhythm(updates, delay, wanted.in_four_bits)
