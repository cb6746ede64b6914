"""The share of a round that is left for updates."""

import pytest

from adloco_dist.policy.simulation import GROWS_FROM, RoundForecast, computing_seconds, rounds_until, shortest_round


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


def test_the_shortest_round_by_hand() -> None:
    """An average of 100 s, updates of 2 s, three quarters of the time in updates."""
    assert shortest_round(0.75, 2.0, 100.0, fragments=1, delay_updates=0) == 150
    assert shortest_round(0.75, 2.0, 100.0, fragments=1, delay_updates=10) == 120, "20 s of it are hidden"
    assert shortest_round(0.75, 2.0, 100.0, fragments=5, delay_updates=10) == 55, "all of it, and there must be room"
    assert shortest_round(0.75, 2.0, 100.0, fragments=5, delay_updates=None) == 5 * 9, (
        "8 of 9 updates hide 16 s of 20 s"
    )


@pytest.mark.parametrize("transfer", [0.1, 7.3, 900.0])
@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("delay", [0, 5, None])
def test_the_shortest_round_is_long_enough_and_no_longer(transfer: float, fragments: int, delay: int | None) -> None:
    def utilisation(updates: int) -> float:
        hiding = updates // fragments - 1 if delay is None else delay
        return RoundForecast(updates, hiding, transfer, fragments).utilisation(0.3)

    shortest = shortest_round(0.95, 0.3, transfer, fragments, delay)
    assert utilisation(shortest) >= 0.95 - 1e-9
    least = fragments * (2 if delay is None else delay + 1)
    step = fragments if delay is None else 1
    assert shortest - step < least or utilisation(shortest - step) < 0.95


def test_the_time_of_an_update_from_its_products() -> None:
    assert computing_seconds(num_parameters=10**9, tokens=2000, flops_per_second=1.2e14) == pytest.approx(0.1)


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
