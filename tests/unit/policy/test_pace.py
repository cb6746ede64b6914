"""How many updates each worker takes where ranks differ in speed."""

import pytest

from adloco_dist.config import RoundLength
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import effective_workers, worker_updates
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from helpers.support import FOUR_TRAINERS, small_settings

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
    assert worker_updates(RoundLength.speed, layout, 20, seconds, {}) == expected
    assert worker_updates(RoundLength.updates, layout, 20, seconds, {}) == {}


def test_the_plan_counts_what_workers_take() -> None:
    settings = small_settings(*FOUR_TRAINERS, *BY_SPEED, "pool.workers_per_trainer=2")
    first = plan_round(settings, PlanInputs(PAIR), None, PoolReport())
    assert first.worker_updates == {}
    second = plan_round(settings, PlanInputs(PAIR), first, PoolReport(update_seconds=(0.1, 0.2)))
    assert (second.updates_of(0, 0), second.updates_of(0, 1)) == (20, 10)
    assert [second.updates_by(update, 0, 1) for update in (0, 5, 10, 20)] == [0, 2, 5, 10]
    assert second.sequences(0) == 2 * (20 + 10)
    third = plan_round(settings, PlanInputs(PAIR), second, PoolReport())
    assert third.pool_tokens - second.pool_tokens == second.round_tokens == 60 * settings.data.sequence_length
    assert second.pool_tokens == first.round_tokens == 80 * settings.data.sequence_length


def test_unequal_workers_take_larger_batches_for_the_same_noise() -> None:
    assert effective_workers([10, 10, 10]) == pytest.approx(3)
    assert effective_workers([3, 1]) == pytest.approx(1 / (0.75**2 + 0.25**2))
    settings = small_settings(*FOUR_TRAINERS, *BY_SPEED, "pool.workers_per_trainer=2", "batching.request=norm_test",
                              "batching.local_batch=8", "batching.unmeasured=keep", "merge=none")  # fmt: skip
    first = plan_round(settings, PlanInputs(PAIR), None, PoolReport())
    second = plan_round(settings, PlanInputs(PAIR), first, PoolReport(update_seconds=(0.1, 0.3)))
    assert second.worker_updates == {0: (20, 6)}
    assert second.batches[0].bounded == 16
    assert second.batches[0].local_batch == 11, "16 (20^2 + 6^2) / 26^2 = 10.3"
    given = small_settings(
        *FOUR_TRAINERS, *BY_SPEED, "pool.workers_per_trainer=2", "batching.request=none", "batching.local_batch=8"
    )
    first = plan_round(given, PlanInputs(PAIR), None, PoolReport())
    second = plan_round(given, PlanInputs(PAIR), first, PoolReport(update_seconds=(0.1, 0.3)))
    assert second.batches[0].local_batch == 8, "a batch that is given is taken as it is"
