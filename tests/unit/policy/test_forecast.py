"""The share of a round that is left for updates."""

import pytest

from adloco_dist.policy.forecast import GROWS_FROM, RoundForecast, rounds_until


def test_what_no_update_hides_is_exposed() -> None:
    plain = RoundForecast(updates=25, delay_updates=0, transfer_seconds=5.0)
    assert plain.utilisation(0.2) == pytest.approx(0.5)
    assert plain.update_seconds(0.5) == pytest.approx(0.2)
    streamed = RoundForecast(updates=25, delay_updates=5, transfer_seconds=5.0, fragments=4)
    assert streamed.utilisation(0.25) == 1.0
    assert streamed.utilisation(0.05) == pytest.approx(1.25 / (1.25 + 4 * (1.25 - 0.25)))


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_the_time_of_an_update_that_is_enough(share: float) -> None:
    for forecast in (RoundForecast(25, 0, 5.0), RoundForecast(25, 5, 5.0, 4), RoundForecast(50, 10, 0.3, 2)):
        seconds = forecast.update_seconds(share)
        assert forecast.utilisation(seconds) == pytest.approx(share)
        assert forecast.utilisation(0.9 * seconds) < share <= forecast.utilisation(1.1 * seconds)


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.5, 1.0, 1.4])
def test_averages_until_a_budget_is_spent(exponent: float) -> None:
    """Counted round by round, with a batch that follows what was seen."""
    sequences, updates, first = 1e6, 10, 8
    seen, rounds = 0.0, 0
    while seen < sequences:
        seen += updates * first * max(1.0, seen / (GROWS_FROM * sequences)) ** exponent
        rounds += 1
    assert rounds_until(sequences, updates, first, exponent) == pytest.approx(rounds, rel=0.01)


def test_a_constant_batch_averages_once_in_so_many_sequences() -> None:
    assert rounds_until(8000, 10, 8, 0.0) == pytest.approx(100)
    assert rounds_until(8000, 20, 8, 1.0) == rounds_until(8000, 10, 16, 1.0)
