"""What rounds will be like on links that were measured: the time of their averages, H, and what is gained at most."""

from collections.abc import Collection, Sequence

from adloco_dist.cluster.environment import Link
from adloco_dist.config import RoundLength, Settings
from adloco_dist.policy.link import Rhythm, RoundCost, best_rhythm, drift_factor, over_signs
from adloco_dist.policy.simulation import RoundForecast, exchanges
from adloco_dist.setup.scale import GOOD_UTILISATION, Traffic

UPDATE_SECONDS = (0.01, 0.1, 1.0, 10.0)
"""For which rounds are forecast."""
SHORTEST_SECONDS = 1e-3
"""Of updates that are looked at."""


def averages_seconds(settings: Settings, num_bytes: float, links: Collection[Link], num_nodes: int) -> float:
    """What a round's averages take between so many nodes, with wire.format=adaptive in signs: their bytes on the
    slowest of the links, and an exchange's round trip on the farthest."""
    if not links:
        return 0.0
    algorithm, wire = settings.algorithm, settings.wire
    num_averages = algorithm.updates_per_round if algorithm.is_data_parallel else wire.fragments
    round_trips = num_averages * exchanges(wire.format, num_nodes)
    rate, round_trip = min(link.bytes_per_second for link in links), max(link.latency_seconds for link in links)
    return num_bytes / rate + round_trips * round_trip


def seconds_on_links(
    settings: Settings, traffic: Traffic, seats: Sequence[int], nodes: Sequence[int], links: Sequence[Link]
) -> float:
    """The same of a trainer, by its seats; 0 if all are on one node. `nodes` has the node of every seat."""
    of_trainer = {nodes[seat] for seat in seats}
    between = [link for link in links if of_trainer.issuperset(link.nodes)]
    return averages_seconds(settings, traffic.over_link(seats), between, len(of_trainer))


def forecast(settings: Settings, workers: int, averages: float, update_seconds: float) -> RoundForecast:
    """The rounds of a rank with so many workers whose updates take so long, by the seconds of a round's averages."""
    wire, algorithm = settings.wire, settings.algorithm
    rhythm = Rhythm(algorithm.updates_per_round, wire.delay_updates or 0)
    if algorithm.round is RoundLength.link:
        waiting, hidden = (0.0, averages) if wire.is_delayed else (averages, 0.0)
        rhythm = best_rhythm(algorithm, wire, [RoundCost(workers * update_seconds, waiting, hidden)])
        averages *= over_signs(rhythm.in_four_bits)
    return RoundForecast(rhythm.updates * workers, rhythm.delay_updates * workers, averages, wire.fragments)


def shortest_update(settings: Settings, workers: int, averages: float) -> float | None:
    """Seconds of the shortest update with which a rank spends most of its time in updates, to a factor of two; None:
    none of up to a minute does. Arguments as of `forecast`."""
    looked_at = [SHORTEST_SECONDS * 2**power for power in range(17)]
    is_good = (forecast(settings, workers, averages, one).utilisation(one) >= GOOD_UTILISATION for one in looked_at)
    return next((seconds for seconds, good in zip(looked_at, is_good, strict=True) if good), None)


def progress(expected: RoundForecast, workers: int, num_workers: int, update_seconds: float) -> float:
    """What a trainer's workers reach in a second over what one does, at most, less what they lose as they drift apart
    in a round; of a rank with so many workers."""
    rhythm = Rhythm(expected.updates // workers, expected.delay_updates // workers)
    return expected.utilisation(update_seconds) * num_workers / drift_factor(rhythm)


def in_words(settings: Settings, workers: int, num_workers: int, averages: float, update_seconds: float) -> str:
    """A rank's share of the time in updates, H where it follows, and the progress of a trainer's workers over that of
    one at most."""
    expected = forecast(settings, workers, averages, update_seconds)
    length = f", H {expected.updates // workers}" if settings.algorithm.round is RoundLength.link else ""
    times = progress(expected, workers, num_workers, update_seconds)
    return f"{expected.utilisation(update_seconds):.0%}{length}, {times:.2g}x"
