"""What asks for a batch, against hand-worked numbers, and what bounds the answer."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.noise import requests
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.batch import BatchInputs, BatchPlan, BatchReport
from adloco_dist.policy.request import variance_test_request
from helpers.support import first_batch, next_batch, sequence_gradients

MEASURED = GradientStatistics(
    trace=12.0, squared_norm=0.5, sequences=8.0, ip_variance=3.0, ip_error=0.0, ip_corrected=True
)


def settings(*overrides: str) -> Settings:
    return compose(["algorithm=diloco", "batching.request=norm_test", "batching.local_batch=4", *overrides])


def rounds(
    settings: Settings,
    reports: list[GradientStatistics | None],
    inputs: BatchInputs | None = None,
    replayed: Sequence[int | None] = (),
) -> list[BatchPlan]:
    """The plans of the first round and of one after each report; the budget is spent evenly."""
    inputs = inputs or BatchInputs(num_workers=2)
    recorded = iter(replayed or [None] * (1 + len(reports)))
    plans = [first_batch(settings, inputs, next(recorded))]
    for round_, statistics in enumerate(reports, start=1):
        fraction, tokens = round_ / (len(reports) + 1), 100 * round_
        report = BatchReport(statistics)
        plans.append(next_batch(settings, inputs, plans[-1], report, fraction, tokens, next(recorded)))
    return plans


def totals(plans: list[BatchPlan]) -> list[float]:
    return [plan.bounded for plan in plans]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["batching.eta=0.5"], 12 / (0.25 * 0.5)),
        (["batching.eta=0.5", "batching.gradient_norm=plugin"], 12 / (0.25 * 2.0)),
        (["batching.request=inner_product_test", "batching.theta=0.5"], 3 / (0.25 * 0.5**2)),
        (
            ["batching.request=augmented_inner_product_test", "batching.theta=0.5", "batching.nu=2"],
            max(3 / (0.25 * 0.5**2), 6 / (4 * 0.5)),
        ),
        (
            ["batching.request=augmented_inner_product_test", "batching.theta=100", "batching.nu=0.1"],
            6 / (0.01 * 0.5),
        ),
    ],
)
def test_a_test_asks_for_what_its_formula_says(overrides: list[str], expected: float) -> None:
    request = variance_test_request(settings(*overrides).batching, MEASURED)
    assert request.sequences == pytest.approx(expected)
    assert request.note is None


def test_inner_products_below_the_sketchs_error_leave_it_to_the_norm_test() -> None:
    lost = dataclasses.replace(MEASURED, ip_variance=1.0, ip_error=1.5)
    for request in ("inner_product_test", "augmented_inner_product_test"):
        asked = variance_test_request(settings(f"batching.request={request}", "batching.eta=0.5").batching, lost)
        assert asked.sequences == pytest.approx(12 / (0.25 * 0.5))
        assert asked.note is not None
        assert "norm test decides" in asked.note
    assert requests.inner_product_test(lost, 0.5).note == "inner products are lost in the sketch's error"
    resolved = dataclasses.replace(MEASURED, ip_variance=1.5, ip_error=1.0)
    inner_product_test = settings("batching.request=inner_product_test", "batching.theta=1")
    asked = variance_test_request(inner_product_test.batching, resolved)
    assert asked.sequences == pytest.approx(1.5 / 0.5**2)


def test_bollapragadas_tests_on_exact_gradients() -> None:
    """The sample tests of Bollapragada, Byrd and Nocedal (2018), written as in the paper, hold from our request on."""
    rows = sequence_gradients(24)
    mean, count = rows.mean(0), len(rows)
    norm = float(mean @ mean)
    measured = statistics_from_gram(torch.from_numpy(rows @ rows.T), torch.ones(count), plugin=True)
    variance = float(((rows - mean) ** 2).sum() / (count - 1))
    along = rows @ mean
    across = rows - np.outer(along, mean) / norm
    along_variance = float(((along - norm) ** 2).sum() / (count - 1))
    across_variance = float((across**2).sum() / (count - 1))
    theta, nu, eta = 0.3, 0.7, 0.4
    plugin = ["batching.gradient_norm=plugin", f"batching.theta={theta}", f"batching.nu={nu}", f"batching.eta={eta}"]
    expected = {
        "norm_test": variance / (eta**2 * norm),
        "inner_product_test": along_variance / (theta**2 * norm**2),
        "augmented_inner_product_test": max(
            along_variance / (theta**2 * norm**2), across_variance / (nu**2 * norm)
        ),
    }  # fmt: skip
    for name, batch in expected.items():
        request = variance_test_request(settings(f"batching.request={name}", *plugin).batching, measured)
        assert request.sequences == pytest.approx(batch, rel=1e-9)
    assert expected["augmented_inner_product_test"] > expected["inner_product_test"], "the second part decides here"


def test_noise_only_asks_for_infinity_and_grows_by_the_bound() -> None:
    noise = dataclasses.replace(MEASURED, squared_norm=-0.1)
    for request in ("norm_test", "inner_product_test", "augmented_inner_product_test"):
        plans = rounds(settings(f"batching.request={request}", "batching.growth_limit=3"), [noise, noise])
        assert totals(plans) == [8, 24, 72]
        assert plans[1].request == math.inf
        assert plans[1].bound == "growth_limit"
        assert plans[1].note is not None
        assert "only noise" in plans[1].note
        assert [plan.local_batch for plan in plans] == [4, 12, 36]


def test_growth_is_limited_and_counted_from_the_last_bounded_request() -> None:
    plans = rounds(settings("batching.growth_limit=1.5", "batching.eta=1", "batching.span=0"), [MEASURED] * 4)
    assert totals(plans) == [8, 12, 18, 24, 24]
    assert [plan.bound for plan in plans] == [None, "growth_limit", "growth_limit", None, None]
    assert [plan.local_batch for plan in plans] == [4, 6, 9, 12, 12]


def test_a_wrong_upward_step_is_taken_back_unless_batches_may_not_shrink() -> None:
    """One noisy round doubles the batch; the next measurements are as calm as before."""
    calm = dataclasses.replace(MEASURED, trace=4.0)
    noisy = dataclasses.replace(MEASURED, trace=400.0)
    shrinking = rounds(settings("batching.eta=1", "batching.span=0"), [calm, noisy, calm])
    assert totals(shrinking) == [8, 8, 16, 8]
    ratchet = rounds(settings("batching.eta=1", "batching.span=0", "batching.shrink_limit=1"),
                     [calm, noisy, calm])  # fmt: skip
    assert totals(ratchet) == [8, 8, 16, 16]
    assert ratchet[-1].bound == "shrink_limit"
    assert ratchet[-1].request == 8


def test_least_and_largest_batches() -> None:
    small, large = dataclasses.replace(MEASURED, trace=0.1), dataclasses.replace(MEASURED, trace=1e6)
    bounds = ("batching.min_batch=6", "batching.max_batch=9", "batching.span=0")
    plans = rounds(settings(*bounds), [small, large, large])
    assert totals(plans) == [8, 6, 9, 9]
    assert [plan.bound for plan in plans] == [None, "min_batch", "max_batch", "max_batch"]
    assert [plan.local_batch for plan in plans] == [4, 3, 5, 5], "b = ceil(B / M)"


def test_a_test_never_shrinks_a_batch_to_where_it_could_not_measure() -> None:
    """One worker with one sequence would keep that batch for ever."""
    small = dataclasses.replace(MEASURED, trace=0.1)
    one_worker = BatchInputs(num_workers=1)
    plans = rounds(settings("batching.span=0", "batching.min_batch=1"), [small, small, MEASURED], one_worker)
    assert totals(plans) == [4, 2, 2, 4]
    assert [plan.bound for plan in plans] == [None, "shrink_limit", "measurable", "growth_limit"]


def test_batches_shrink_by_a_bound_and_not_below_the_first() -> None:
    """One odd measurement took 64 sequences to 2; below the first batch, updates cost more than they are worth."""
    small = dataclasses.replace(MEASURED, trace=0.1)
    large = dataclasses.replace(MEASURED, trace=1e6)
    plans = rounds(settings("batching.span=0", "batching.shrink_limit=4"), [large, large, large, small, small, small])
    assert totals(plans) == [8, 16, 32, 64, 16, 8, 8]
    assert [plan.bound for plan in plans[4:]] == ["shrink_limit", "min_batch", "min_batch"]
    assert [plan.local_batch for plan in plans[4:]] == [8, 4, 4], "as many sequences for each worker as at first"
    open_loop = settings("batching.request=staged", "batching.stages=[[0,2]]")
    assert totals(rounds(open_loop, [None])) == [2, 2], "what was asked for by hand is taken"


def test_the_papers_formula_grows_by_its_noise_alone() -> None:
    """Noise scale 1000: while noise dominates, |gbar|^2 is tr(Sigma) / S, and the request S / eta^2, in every round."""
    papers = compose(["experiment=paper", "batching.growth_limit=10"])
    plan = first_batch(papers, BatchInputs(num_workers=1))
    batches = [plan.local_batch]
    for round_ in range(1, 16):
        measured = GradientStatistics(1000.0, 1.0, float(max(2, plan.local_batch)), 0.0, 0.0, ip_corrected=False)
        plan = next_batch(papers, BatchInputs(num_workers=1), plan, BatchReport(measured), round_ / 16, 1000 * round_)
        batches.append(plan.local_batch)
    growth = [later / earlier for earlier, later in pairwise(batches[5:10])]
    assert all(1.4 < one < 1.7 for one in growth), "1.56; averaged over rounds it was 1.04"
    assert batches[-1] > 300


def test_a_shard_smaller_than_the_batch_caps_it_with_a_warning() -> None:
    inputs = BatchInputs(num_workers=3, shard_sequences=20)
    large = dataclasses.replace(MEASURED, trace=1e6)
    plans = rounds(settings(), [large, large], inputs)
    assert totals(plans) == [12, 20, 20]
    assert [plan.local_batch for plan in plans] == [4, 6, 6], "3 x 7 would take a sequence twice in one update"
    assert plans[1].bound == "shard"
    assert plans[1].note is not None
    assert "20 sequences, one epoch" in plans[1].note
    too_large_from_the_start = rounds(settings("batching.local_batch=50", "batching.request=none"), [None], inputs)
    assert [plan.local_batch for plan in too_large_from_the_start] == [6, 6]
    assert too_large_from_the_start[0].bound == "shard"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_statistics_that_are_not_finite_never_change_a_batch(value: float) -> None:
    broken = dataclasses.replace(MEASURED, ip_variance=value)
    plans = rounds(settings("batching.eta=1", "batching.span=0.2"), [MEASURED, broken, MEASURED])
    assert totals(plans) == [8, 16, 16, 24]
    assert plans[2].note is not None
    assert "not finite" in plans[2].note
    assert plans[2].smoothed == plans[1].smoothed, "nothing of it stays"


def test_one_gradient_alone_measures_nothing() -> None:
    alone = BatchInputs(num_workers=1)
    keep = rounds(settings("batching.local_batch=1"), [None, None], alone)
    assert totals(keep) == [1, 1, 1]
    assert keep[1].note is not None
    assert "nothing to measure" in keep[1].note
    grow = rounds(settings("batching.local_batch=1", "batching.unmeasured=grow"), [None, MEASURED], alone)
    assert totals(grow) == [1, 2, 4]


def test_open_loop_requests() -> None:
    assert totals(rounds(settings("batching.request=none"), [None] * 3)) == [8, 8, 8, 8]
    rising = settings("batching.request=ramp", "batching.ramp_factor=1.5", "batching.growth_limit=1.1")
    ramp = rounds(rising, [None] * 3)
    assert totals(ramp) == [8, 12, 18, 27], "the growth limit is for tests, which may err"
    assert [plan.local_batch for plan in ramp] == [4, 6, 9, 14]
    staged = settings("batching.request=staged", "batching.stages=[[0,4],[0.5,16],[0.75,8]]")
    plans = rounds(staged, [None] * 3)
    assert totals(plans) == [4, 4, 16, 8], "stages begin at 0, 0.5 and 0.75 of the budget; rounds at quarters of it"
    replay = settings("batching.request=replay", "batching.replay=x", "budget=20rounds")
    plans = rounds(replay, [None, None, None], replayed=[6, 10, 3, None])
    assert totals(plans) == [6, 10, 3, 3]
    assert [plan.local_batch for plan in plans] == [3, 5, 2, 2]
