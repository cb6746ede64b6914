"""Which trainers end at a rung, and at which rates trainers learn: pure functions, and the plans that come of them."""

import math

import pytest

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.experiment import PoolSettings
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import TrainerView, halve, trainers_left
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.schedule import rate_over_a_part
from helpers.support import FOUR_TRAINERS, small_settings

FOUR = Layout.one_rank_per_worker({trainer: (trainer,) for trainer in range(4)})
HALVING = ("merge=halving", "merge.rungs=[0.2,0.4]", "pool.rates=[0.25,4]", "budget=40rounds", "evaluation.every=null")


def view(loss: float | None, *ranks: int, is_finite: bool = True) -> TrainerView:
    return TrainerView(1.0, 1.0, is_finite, validation_loss=loss, ranks=ranks)


@pytest.mark.parametrize(
    ("num_trainers", "left"),
    [(2, [2, 2, 1]), (3, [3, 2, 1]), (4, [4, 2, 1]), (8, [8, 3, 1]), (16, [16, 4, 1]), (1, [1, 1, 1])],
)
def test_as_large_a_part_is_left_at_each_rung_and_one_after_the_last(num_trainers: int, left: list[int]) -> None:
    assert [trainers_left(num_trainers, [0.06, 0.12], fraction) for fraction in (0.0599, 0.06, 0.12)] == left


def test_the_worst_works_for_the_best_and_the_next_worst_for_the_next_best() -> None:
    first = halve({0: view(2.0, 0), 1: view(1.0, 1), 2: view(3.0, 2), 3: view(1.5, 3)}, 2)
    assert first
    assert (first.survivor, first.ended, first.shares) == (1, [2], {1: 1.0, 2: 0.0})
    second = halve({0: view(2.0, 0), 1: view(1.0, 1, 2), 3: view(1.5, 3)}, 2)
    assert second
    assert (second.survivor, second.ended) == (3, [0]), "the one with fewer ranks"
    assert halve({1: view(1.0, 1, 2), 3: view(1.5, 3, 0)}, 2) is None


def test_losses_that_are_not_known_end_nobody_and_one_that_is_not_finite_ends_first() -> None:
    assert halve({0: view(2.0, 0), 1: view(None, 1)}, 1) is None
    for worst in (view(math.nan, 1), view(0.5, 1, is_finite=False), view(None, 1, is_finite=False)):
        merge = halve({0: view(2.0, 0), 1: worst, 2: view(9.0, 2)}, 2)
        assert merge
        assert merge.ended == [1]


def test_rates_lie_on_a_grid_or_are_named() -> None:
    grid, named = PoolSettings(trainers=5, rates=[0.25, 4.0]), PoolSettings(trainers=3, rates=[1.0, 3.0, 2.0])
    assert [grid.rate_factor(trainer) for trainer in range(5)] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert [named.rate_factor(trainer) for trainer in range(3)] == [1.0, 3.0, 2.0]
    assert PoolSettings(trainers=2).rate_factor(1) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pool.trainers=4", "pool.rates=[1,2,3]"], r"pool.rates=\[1.0, 2.0, 3.0\]: must be two rates > 0, or one for"),
        (["pool.trainers=2", "pool.rates=[0,1]"], r"pool.rates=\[0.0, 1.0\]: must be two rates > 0"),
        (["merge=halving", "merge.rungs=[0.2,0.1]"], r"merge.rungs=\[0.2, 0.1\]: must be rising shares of the budget"),
        (["merge=halving", "merge.rungs=[]"], r"merge.rungs=\[\]: must be rising shares"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        small_settings(*overrides)


def run(settings: Settings, losses: list[float]) -> list[RoundPlan]:
    """The plans of a run in which trainers have these losses wherever they are evaluated."""
    plans: list[RoundPlan] = []
    reports: list[PoolReport | None] = [PoolReport(), None]
    while not plans or not plans[-1].stop:
        plan = plan_round(settings, PlanInputs(FOUR), plans[-1] if plans else None, reports[len(plans)])
        plans.append(plan)
        found = {trainer: losses[trainer] for trainer in plan.layout.trainers} if plan.evaluate else {}
        reports.append(PoolReport(updates=plan.updates, validation_loss=found, outer_steps=1))
    return plans


def test_a_run_ends_with_the_best_rate_and_all_its_workers() -> None:
    settings = small_settings(*FOUR_TRAINERS, *HALVING)
    plans = run(settings, [3.0, 2.0, 1.0, 4.0])
    merges = [(plan.round, plan.merge.survivor, plan.merge.ended) for plan in plans if plan.merge]
    assert merges == [(10, 2, [3]), (11, 1, [0]), (18, 2, [1])], "two rounds after the rungs of 8 and 16 rounds"
    over = rate_over_a_part(0.4)
    assert plans[0].rate_factors == pytest.approx({0: 0.25 * over, 1: 0.63 * over, 2: 1.59 * over, 3: 4 * over})
    assert plans[11].rate_factors.keys() == {1, 2}
    assert plans[-1].rate_factors == {2: 1.59}, "that of a whole run, when there is nothing to judge any more"
    assert plans[-1].layout.num_workers(2) == 4
    evaluated = [plan.round for plan in plans if plan.evaluate]
    assert evaluated == [8, 9, 10, 16, 17], "as long as a trainer is to end"
