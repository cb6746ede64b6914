"""What follows measurements that not every round takes, and the times of updates."""

import dataclasses
import math

import numpy as np
import pytest

from adloco_dist.config import InnerOptimizer
from adloco_dist.config.compose import compose
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.batch import BatchInputs, BatchPlan, BatchReport
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.passes import PassCost, Passes, fit
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from helpers.support import first_batch, next_batch, small_settings

MEASURED = GradientStatistics(
    trace=12.0, squared_norm=0.5, sequences=8.0, ip_variance=3.0, ip_error=0.0, ip_corrected=True
)


BY_PROGRESS = ["batching.request=progress", "batching.span=0", "batching.local_batch=1", "batching.growth_limit=1000"]


def by_progress(statistics: GradientStatistics, sequence_seconds: float, update_seconds: float) -> BatchPlan:
    """Two workers' batch after a first round of one sequence each."""
    first = first_batch(compose(BY_PROGRESS), inputs := BatchInputs(num_workers=2))
    passes = [Passes(1, 1, sequence_seconds)] if sequence_seconds else []
    report = BatchReport(statistics, passes, update_seconds, local_batch=1)
    return next_batch(compose(BY_PROGRESS), inputs, first, report, 0.1, 100)


def test_the_batch_with_the_most_progress_per_second() -> None:
    """Noise scale 24; every update costs 3 s beside 1 s a sequence, of both workers side by side."""
    plan = by_progress(MEASURED, 1.0, 3.0 + 1.0)
    assert plan.request == pytest.approx(math.sqrt(2 * 24 * 3))

    def progress_per_second(total: float) -> float:
        return 1 / (1 + 24 / total) / (3.0 + total / 2)

    best = max(np.arange(1, 100, 0.5), key=progress_per_second)
    assert plan.request == pytest.approx(best, abs=0.5)
    assert plan.local_batch == 6


def test_muon_bears_four_times_the_noise() -> None:
    """So its batches are twice as large, and a second worker is worth more to it."""
    inputs = {optimizer: BatchInputs(num_workers=2, optimizer=optimizer) for optimizer in InnerOptimizer}
    report = BatchReport(MEASURED, [Passes(1, 1, 1.0)], 4.0, exposed_share=0.0, local_batch=1)
    plans = {
        optimizer: next_batch(asked := compose(BY_PROGRESS), one, first_batch(asked, one), report, 0.1, 100)
        for optimizer, one in inputs.items()
    }
    muon, adamw = plans[InnerOptimizer.muon], plans[InnerOptimizer.adamw]
    assert muon.request == pytest.approx(2 * adamw.request)
    assert muon.worth == pytest.approx((1 + 96 / muon.local_batch) / (1 + 96 / (2 * muon.local_batch)))
    assert plans[InnerOptimizer.sgd] == adamw


@pytest.mark.parametrize(
    ("statistics", "update_seconds", "bounded", "bound"),
    [
        (MEASURED, 1.0, 2, "measurable"),  # an update costs nothing: the smallest batches
        (dataclasses.replace(MEASURED, trace=0.0), 4.0, 2, "measurable"),  # no noise
        (dataclasses.replace(MEASURED, squared_norm=-1.0), 4.0, 2, None),  # nothing but noise: it stays
        (MEASURED, 1e9, 2000, "growth_limit"),  # a link that takes for ever
    ],
)
def test_limits_of_progress_per_second(
    statistics: GradientStatistics, update_seconds: float, bounded: float, bound: str | None
) -> None:
    plan = by_progress(statistics, 1.0, update_seconds)
    assert (plan.bounded, plan.bound) == (bounded, bound)


@pytest.mark.parametrize(
    ("seen", "cost"),
    [
        ([Passes(2, 4, 2.0), Passes(1, 4, 1.5)], PassCost(0.5, 0.25)),  # in two micro-batches, and in one
        ([Passes(1, 4, 1.5), Passes(1, 16, 4.5)], PassCost(0.5, 0.25)),  # a batch that has grown
        ([Passes(2, 4, 2.0), Passes(1, 4, 1.0)], PassCost(1.0, 0.0)),  # a GPU that waits for its launches
        ([Passes(2, 4, 1.0), Passes(1, 4, 1.1)], PassCost(0.0, 0.2619)),  # smaller passes are faster: they cost nothing
        ([Passes(1, 4, 1.0), Passes(2, 8, 2.0)], PassCost(0.0, 0.25)),  # nothing to tell the two apart by
        ([Passes(1, 4, 1.0), Passes(1, 5, 1.0)], PassCost(0.0, 0.2195)),  # too little: it may be chance
        ([Passes(2, 4, 2.0), *3 * [Passes(1, 4, 1.5)], Passes(1, 4, 90.0)], PassCost(0.5, 0.25)),  # one was interrupted
        ([Passes(1, 4, 0.0), Passes(1, 8, 0.0)], PassCost(0.0, 0.0)),  # a simulated clock that does not count them
        ([], None),
    ],
)
def test_what_passes_cost_is_fitted(seen: list[Passes], cost: PassCost | None) -> None:
    found = fit(seen)
    assert (found is None) == (cost is None)
    if found and cost:
        assert found.micro_batch_seconds == pytest.approx(cost.micro_batch_seconds, abs=1e-3)
        assert found.sequence_seconds == pytest.approx(cost.sequence_seconds, abs=1e-3)


def test_a_pass_s_own_time_is_no_cost_of_its_sequences() -> None:
    """A pass of 4 takes 1.5 s, of which 0.5 whatever its size, and all else 0.5 s: 1 s is fixed, not 0.5."""
    asked, inputs = compose([*BY_PROGRESS, "batching.local_batch=4"]), BatchInputs(num_workers=1)
    report = BatchReport(MEASURED, [Passes(2, 4, 2.0), Passes(1, 4, 1.5)], 2.0, local_batch=4)
    plan = next_batch(asked, inputs, first_batch(asked, inputs), report, 0.1, 100)
    assert plan.request == pytest.approx(math.sqrt(24 * 1.0 / 0.25))
    later = next_batch(asked, inputs, plan, BatchReport(MEASURED, [Passes(1, 10, 3.0)], 3.5, local_batch=10), 0.2, 200)
    assert later.request == pytest.approx(math.sqrt(24 * 1.0 / 0.25)), "the line is the same at the new batch"


def test_without_times_a_batch_stays() -> None:
    plan = by_progress(MEASURED, 0.0, 0.0)
    assert plan.bounded == 2
    assert plan.note is not None
    assert "no times were measured" in plan.note


def test_rounds_that_measure_nothing_change_no_batch() -> None:
    asked = compose(
        [
            "algorithm=diloco",
            "batching.request=norm_test",
            "batching.local_batch=4",
            "batching.eta=1",
            "batching.growth_limit=2",
        ]
    )
    inputs = BatchInputs(num_workers=2)
    skipped = BatchReport(is_measured=False)
    untouched = next_batch(asked, inputs, first_batch(asked, inputs), skipped, 0.1, 100)
    assert (untouched.bounded, untouched.note) == (8, None)
    measured = next_batch(asked, inputs, untouched, BatchReport(MEASURED), 0.2, 200)
    later = next_batch(asked, inputs, measured, skipped, 0.3, 300)
    assert (measured.bounded, later.bounded) == (16, 16), "it grows once by what was measured once"
    assert (later.request, later.bound, later.smoothed) == (measured.request, "growth_limit", measured.smoothed)


def test_measurements_are_as_many_updates_apart_whatever_the_rounds() -> None:
    def measuring(updates: int) -> list[bool]:
        fixed = small_settings(
            "algorithm.round=updates",
            "wire.delay_updates=0",
            f"algorithm.updates_per_round={updates}",
            "batching.every_updates=20",
            "pool.trainers=1",
            "batching.request=norm_test",
        )
        plans = [plan_round(fixed, PlanInputs(Layout.one_rank_per_worker({0: (0, 1)})), None, PoolReport())]
        for _ in range(8):
            plans.append(plan_round(fixed, PlanInputs(plans[-1].layout), plans[-1], PoolReport()))
        return [plan.measures for plan in plans]

    assert measuring(25) == [True] * 9
    assert measuring(5) == [True, False, False, False, True, False, False, False, True]
    assert measuring(8) == [True, False, False, True, False, False, True, False, False]
