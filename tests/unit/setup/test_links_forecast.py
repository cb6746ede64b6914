"""What rounds will be like on measured links, by hand."""

import pytest

from adloco_dist.cluster.environment import Link
from adloco_dist.config.compose import compose
from adloco_dist.setup.forecast import averages_seconds, forecast, in_words, seconds_on_links
from adloco_dist.setup.scale import Traffic

NEAR, FAR = Link((0, 1), 0.001, 1e7), Link((0, 2), 0.2, 1e6)


@pytest.mark.parametrize(
    ("overrides", "num_nodes", "round_trips"),
    [
        ((), 2, 1),
        ((), 3, 2),  # to owners of slices, and back
        (("wire=fp32",), 3, 2),  # around a ring
        (("algorithm=diloco", "wire=slow_link"), 2, 4),  # of four fragments
        (("algorithm=ddp", "algorithm.updates_per_round=7"), 2, 7),
    ],
)
def test_averages_take_their_bytes_on_the_slowest_link_and_round_trips_on_the_farthest(
    overrides: tuple[str, ...], num_nodes: int, round_trips: int
) -> None:
    seconds = averages_seconds(compose(list(overrides)), 3e6, [NEAR, FAR], num_nodes)
    assert seconds == pytest.approx(3.0 + 0.2 * round_trips)


def test_only_links_between_a_trainers_nodes_count() -> None:
    settings = compose(["algorithm=diloco", "wire=int8"])
    traffic, nodes, links = Traffic(settings, 1_000_000, [0, 1, 2, 0]), (0, 1, 2, 0), [NEAR, FAR, Link((1, 2), 0.1, 1)]
    assert seconds_on_links(settings, traffic, [0, 1], nodes, links) == pytest.approx(0.001 + 0.1016, rel=0.01)
    assert seconds_on_links(settings, traffic, [0, 2], nodes, links) == pytest.approx(0.2 + 1.016, rel=0.01)
    assert seconds_on_links(settings, traffic, [0, 3], nodes, links) == 0, "on one node"


def test_far_rounds_are_longer_and_an_average_that_takes_too_long_does_not_pay() -> None:
    settings = compose([])
    near, far = (forecast(settings, 1, seconds, 0.1).updates for seconds in (0.05, 0.6))
    assert near < far <= 15
    assert in_words(settings, 1, 2, 0.05, 0.1) == f"100%, H {near}, 1.8x", "less than two: they drift apart"
    assert in_words(settings, 1, 2, 10.0, 0.07) == "100%, H 144, 1x", "as much as one alone"
    assert in_words(settings, 1, 2, 30.0, 0.07) == "93%, H 400, 0.86x"
    fixed = compose(["algorithm=diloco", "algorithm.updates_per_round=10"])
    assert in_words(fixed, 1, 4, 3.0, 0.1) == "25%, 0.82x", "less than one alone"
