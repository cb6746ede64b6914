"""How many updates each worker takes where ranks differ in speed."""

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.pace import worker_updates
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from helpers.support import small_settings

PAIR = Layout.one_rank_per_worker({0: (0, 1)})
BY_SPEED = ("algorithm.round=speed", "algorithm.updates_per_round=20", "pool.trainers=1")


@pytest.mark.parametrize(
    ("layout", "seconds", "expected"),
    [
        (PAIR, (0.1, 0.2), {0: (20, 10)}),
        (PAIR, (0.2, 0.1), {0: (10, 20)}),
        (PAIR, (0.1, 0.103), {}),  # as fast as can be told
        (PAIR, (0.1, 0.0), {}),  # not measured
        (PAIR, (), {}),
        (PAIR, (0.001, 1.0), {0: (20, 1)}),
        # Rank 0 has two workers, which have their turns one after the other.
        (Layout.one_rank_per_worker({0: (0, 1), 1: (0,)}), (0.1, 0.1), {0: (10, 20), 1: (10,)}),
    ],
)
def test_updates_are_in_proportion_to_speed(
    layout: Layout, seconds: tuple[float, ...], expected: dict[int, tuple[int, ...]]
) -> None:
    assert worker_updates(small_settings(*BY_SPEED), layout, 20, seconds) == expected
    assert worker_updates(small_settings(), layout, 20, seconds) == {}


def test_the_plan_counts_what_workers_take() -> None:
    settings = small_settings(*BY_SPEED, "pool.workers_per_trainer=2")
    first = plan_round(settings, PlanInputs(PAIR), None, PoolReport())
    assert first.worker_updates == {}
    second = plan_round(settings, PlanInputs(PAIR), first, PoolReport(update_seconds=(0.1, 0.2)))
    assert (second.updates_of(0, 0), second.updates_of(0, 1)) == (20, 10)
    assert [second.updates_by(update, 0, 1) for update in (0, 5, 10, 20)] == [0, 2, 5, 10]
    assert second.sequences(0) == 2 * (20 + 10)
    third = plan_round(settings, PlanInputs(PAIR), second, PoolReport())
    assert third.pool_tokens - second.pool_tokens == second.round_tokens == 60 * settings.data.sequence_length
    assert second.pool_tokens == first.round_tokens == 80 * settings.data.sequence_length


def test_data_parallel_training_has_no_unequal_rounds() -> None:
    with pytest.raises(SettingsError) as raised:
        small_settings("algorithm=ddp", "algorithm.round=speed")
    assert str(raised.value) == "algorithm.round=speed: algorithm=ddp averages at every update; use updates"
