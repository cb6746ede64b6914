"""How many updates each worker takes where ranks differ in speed."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import SAME, RoundCost, effective_workers, worker_speeds, worker_updates
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from helpers.support import FOUR_TRAINERS, small_settings

PAIR = Layout.one_rank_per_worker({0: (0, 1)})
BY_LINK = ("algorithm.round=link", "algorithm.updates_per_round=20", "pool.trainers=1", "pool.workers_per_trainer=2")


def cost_of(turn_seconds: Sequence[float]) -> RoundCost:
    return RoundCost(max(turn_seconds), 0.0, turn_seconds=tuple(turn_seconds))


@pytest.mark.parametrize(
    ("layout", "seconds", "expected"),
    [
        (PAIR, (0.1, 0.2), {0: (1.0, SAME / 2)}),
        (PAIR, (0.2, 0.1), {0: (SAME / 2, 1.0)}),
        (PAIR, (0.1, 0.103), {}),  # as fast as can be told
        (PAIR, (), {}),  # ranks are others than those that were measured
        (PAIR, (0.001, 1.0), {0: (1.0, SAME / 1000)}),
        # Rank 0 has two workers, which have their turns one after the other; rank 2 has none.
        (Layout.one_rank_per_worker({0: (0, 1), 1: (0,)}), (0.2, 0.1, 0.0), {0: (SAME / 2, 1.0), 1: (SAME / 2,)}),
    ],
)
def test_workers_are_nearly_as_fast_as_their_ranks(
    layout: Layout, seconds: tuple[float, ...], expected: dict[int, tuple[float, ...]]
) -> None:
    assert worker_speeds(layout, [cost_of(seconds) if seconds else RoundCost(0.1, 0.0)] * 3) == expected
    assert worker_speeds(layout, []) == {}


def test_one_odd_round_is_no_speed_and_a_rank_that_stays_slow_has_another() -> None:
    usual, slow = cost_of((0.1, 0.1)), cost_of((0.1, 0.4))
    assert worker_speeds(PAIR, [usual] * 3 + [slow]) == {}
    assert worker_speeds(PAIR, [slow] * 2) == {}, "of so few each may be an odd one"
    assert worker_speeds(PAIR, [usual] * 2 + [slow] * 3) == {0: (1.0, SAME / 4)}


def test_ratios_count_whatever_the_batch() -> None:
    """A batch that has grown makes updates longer on all ranks."""
    assert worker_speeds(PAIR, [cost_of((0.1 * factor, 0.2 * factor)) for factor in (1, 2, 4, 8)]) == {
        0: (1.0, SAME / 2)
    }


@pytest.mark.parametrize(("speed", "updates"), [(0.5, 3), (0.7, 2), (0.4, 5), (0.94, 2)])
def test_parts_of_updates_come_in_later_rounds(speed: float, updates: int) -> None:
    owed, taken = [0.0, 0.0], 0
    for round_ in range(1, 101):
        (full, fewer), owed = worker_updates(updates, (1.0, speed), owed)
        taken += fewer
        assert full == updates
        assert taken <= speed * updates * round_ + 1e-6, "never ahead of what it has the time for"
        assert taken > speed * updates * round_ - 1 - 1e-6


def test_a_worker_takes_an_update_in_every_round() -> None:
    assert worker_updates(5, (1.0, 0.001), (0.0, 0.0)) == ([5, 1], [0.0, 0.0])


def planned(*costs: RoundCost, overrides: Sequence[str] = ()) -> list[RoundPlan]:
    """The plans of rounds after which these costs are reported, one round later."""
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire.delay_updates=1", *overrides)
    plans = [plan_round(settings, PlanInputs(PAIR), None, PoolReport())]
    plans.append(plan_round(settings, PlanInputs(PAIR), plans[0], None))
    for cost in costs:
        plans.append(plan_round(settings, PlanInputs(PAIR), plans[-1], PoolReport(cost=cost)))
    return plans


def test_the_plan_counts_what_workers_take() -> None:
    plans = planned(*[cost_of((0.1, 0.18))] * 4, overrides=("algorithm.updates_range=[5,5]",))
    *before, third, fourth = plans
    assert all(plan.worker_updates == {} for plan in before)
    assert third.updates_of_workers(0) == (5, 2)
    assert fourth.updates_of_workers(0) == (5, 3)
    assert [third.updates_by(update, 0, 1) for update in (0, 1, 3, 5)] == [0, 1, 2, 2]
    assert third.sequences(0) == third.batches[0].local_batch * 7
    assert fourth.pool_tokens - third.pool_tokens == third.round_tokens


def test_a_budget_in_tokens_counts_what_slower_workers_take() -> None:
    """The rate of a round goes on where that of the one before has ended, and the last round spends what is left."""
    budget = ("algorithm.updates_range=[10,10]", "budget=40000tokens", "batching.request=none")
    plans = planned(*[cost_of((0.1, 0.95))] * 100, overrides=budget)
    steady = [plan for plan in plans if plan.worker_updates and not plan.stop]
    for plan, following in pairwise(steady):
        ended = plan.progress.fraction + plan.updates * plan.progress.fraction_per_update
        assert ended == pytest.approx(following.progress.fraction, abs=plan.progress.fraction_per_update)
    assert [plan.updates for plan in steady[:-2]] == [10] * (len(steady) - 2), "and no tail of ever shorter rounds"


@pytest.mark.parametrize(("slowness", "expected"), [(7.5, 8), (100, 100), (1000, 400)])
def test_rounds_have_time_for_an_update_of_the_slowest(slowness: float, expected: int) -> None:
    """Within the bounds of algorithm.updates_range: it is as much as everybody is to wait for a rank."""
    *_, last = planned(*[cost_of((0.1, 0.1 * slowness))] * 10)
    assert last.updates_of_workers(0) == (expected, 1)


def test_unequal_workers_take_larger_batches_for_the_same_noise() -> None:
    assert effective_workers([10, 10, 10]) == pytest.approx(3)
    assert effective_workers([3, 1]) == pytest.approx(1 / (0.75**2 + 0.25**2))
    batch = ("batching.request=norm_test", "batching.local_batch=8", "batching.unmeasured=keep", "merge=none")
    *_, last = planned(*[cost_of((0.1, 0.3))] * 3, overrides=batch)
    assert last.batches[0].bounded == 16
    assert last.batches[0].local_batch == 11, "16 (1 + p^2) / (1 + p)^2, with p = SAME / 3"
    *_, given = planned(*[cost_of((0.1, 0.3))] * 3, overrides=("batching.request=none", "batching.local_batch=8"))
    assert given.batches[0].local_batch == 8, "a batch that is given is taken as it is"
