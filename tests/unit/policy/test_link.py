"""H from the link: where it settles, how fast, within which bounds, and that plans carry it."""

import dataclasses
import math
from itertools import pairwise

import pytest

from adloco_dist.averaging.codecs import Signs, WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.config import Settings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.batch import BatchInputs, BatchPlan, BatchReport
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import (
    FOUR_BITS_RATIO,
    Rhythm,
    RoundCost,
    best_rhythm,
    drift_factor,
    first_rhythm,
    remembered,
    rhythm_for_link,
    worth_of_averaging,
)
from adloco_dist.policy.merging import Merge
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from helpers.support import FOUR_TRAINERS, first_batch, next_batch, small_settings

UPDATE_SECONDS = 0.04
BY_LINK = ("algorithm.round=link", "pool.trainers=1", "pool.workers_per_trainer=2", "budget=1000rounds")
PAIR = Layout.one_rank_per_worker({0: (0, 1)})


def settled(settings: Settings, blocking: float, transfer: float = 0.0, rounds: int = 40) -> list[Rhythm]:
    """The rhythm of every round, with costs that are up to a third off, in turns.

    Args:
        blocking: seconds of a round that no delay hides.
        transfer: seconds that its averages need on the link, with wire=adaptive those of the largest elements.
    """
    rhythm, costs, taken, arriving = first_rhythm(settings.algorithm, settings.wire), (), [], False
    ratio = FOUR_BITS_RATIO
    for round_ in range(rounds):
        taken.append(rhythm)
        noise = (1.0, 0.7, 1.3, 0.9, 1.1)[round_ % 5]
        hidden = rhythm.delay_updates * settings.wire.fragments * UPDATE_SECONDS
        travelled = noise * transfer * (ratio if arriving else 1.0)
        waited = max(0.0, travelled - hidden)
        cost = RoundCost(UPDATE_SECONDS, noise * blocking + waited, travelled, waited, float(arriving))
        costs, arriving = remembered(costs, cost), rhythm.in_four_bits
        rhythm = rhythm_for_link(settings.algorithm, settings.wire, costs, rhythm)
    return taken


@pytest.mark.parametrize("seconds", [0.15, 0.26, 0.9, 2.6])
def test_what_workers_wait_for_comes_to_the_share_that_is_asked_for(seconds: float) -> None:
    taken = [rhythm.updates for rhythm in settled(small_settings(*FOUR_TRAINERS, *BY_LINK), seconds)]
    assert seconds / (seconds + taken[-1] * UPDATE_SECONDS) == pytest.approx(0.2, abs=0.05)
    assert len(set(taken[10:])) == 1, "it stays there, though measured costs vary"
    assert max(max(one, other) / min(one, other) for one, other in pairwise(taken)) <= 2


@pytest.mark.parametrize(("blocking", "transfer"), [(0.01, 0.07), (0.01, 0.33), (0.2, 1.0), (0.0, 6.0), (0.3, 0.0)])
@pytest.mark.parametrize("fragments", [1, 3])
def test_delay_and_length_are_the_best_of_all(blocking: float, transfer: float, fragments: int) -> None:
    """The time to a loss by its formula, for every pair of both."""
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire.delay_updates=null", f"wire.fragments={fragments}",
                              "algorithm.updates_range=[1,240]")  # fmt: skip

    def time(updates: int, delay: int) -> float:
        exposed = blocking + max(0.0, transfer - fragments * delay * UPDATE_SECONDS)
        return (updates + 2 * delay) ** 0.2 * (1 + exposed / (updates * UPDATE_SECONDS))

    pairs = [(updates, delay) for updates in range(1, 241) for delay in range(updates // fragments)]
    best = min(time(*pair) for pair in pairs)
    chosen = best_rhythm(settings.algorithm, settings.wire, [RoundCost(UPDATE_SECONDS, blocking, transfer)])
    assert (chosen.updates, chosen.delay_updates) in pairs
    assert time(chosen.updates, chosen.delay_updates) == pytest.approx(best, rel=0.01)


def test_a_delay_that_is_named_stays() -> None:
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire.delay_updates=25")
    assert {rhythm.delay_updates for rhythm in settled(settings, 0.001, 1.0)} == {25}


def test_a_chosen_delay_follows_the_link_and_settles() -> None:
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire.delay_updates=null")
    taken = settled(settings, 0.004, 0.2)
    assert taken[0].delay_updates == 1
    assert taken[-1].delay_updates in (4, 5, 6)
    assert taken[-1].updates in (6, 7, 8)
    assert len(set(taken[15:])) == 1, "it stays there, though measured costs vary"
    assert all(rhythm.updates > rhythm.delay_updates for rhythm in taken), "an average arrives before the next begins"


ADAPTIVE = (*FOUR_TRAINERS, *BY_LINK, "wire=adaptive", "outer=average")


def test_all_elements_travel_where_the_link_is_fast_enough() -> None:
    settings, ratio = small_settings(*ADAPTIVE), FOUR_BITS_RATIO
    fast, slow = settled(settings, 0.001, 0.9 * UPDATE_SECONDS / ratio), settled(settings, 0.001, UPDATE_SECONDS)
    assert [rhythm.in_four_bits for rhythm in fast] == [False] + [True] * 39, "the first round has measured nothing"
    assert fast[-1] == Rhythm(2, 1, in_four_bits=True)
    at_once = settled(settings, 0.001, 0.1 * UPDATE_SECONDS / ratio)
    assert at_once[-1] == Rhythm(1, 0, in_four_bits=True), "what costs next to nothing is waited for after every update"
    assert at_once[0].delay_updates == 1, "a link that nobody knows may be slow"
    assert not any(rhythm.in_four_bits for rhythm in slow)
    named = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire=sparse", "wire.delay_updates=null", "outer=average")
    assert not any(rhythm.in_four_bits for rhythm in settled(named, 0.001, 0.001)), "another format is what it is"


def test_a_link_that_has_become_slow_carries_the_largest_alone() -> None:
    settings, last = small_settings(*ADAPTIVE), Rhythm(2, 1, in_four_bits=True)
    slow = RoundCost(UPDATE_SECONDS, 0.5, 0.5, 0.46, four_bits_share=1.0)
    assert not rhythm_for_link(settings.algorithm, settings.wire, [slow] * 5, last).in_four_bits


@pytest.mark.parametrize("hosts", [2, 3, 8, 64])
def test_plans_count_the_bytes_that_averagers_send(hosts: int) -> None:
    four_bits, one = (Quantized(codec).bytes_per_rank(1 << 24, 0, range(hosts)) for codec in (WholeNumbers(4), Signs()))
    assert four_bits / one == pytest.approx(FOUR_BITS_RATIO, rel=1e-3)


def test_bounds_hold_whatever_was_measured() -> None:
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK, "algorithm.updates_range=[7,60]")
    assert settled(settings, 1e-6)[-1].updates == 7
    assert settled(settings, 1e6)[-1].updates == 60
    chosen = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire.delay_updates=null", "algorithm.updates_range=[7,60]")
    for blocking, transfer in ((1e-6, 1e6), (1e6, 1e6), (1e-6, 1e-6)):
        assert 7 <= settled(chosen, blocking, transfer)[-1].updates <= 60
    spread = small_settings(*FOUR_TRAINERS, *BY_LINK, "wire.fragments=4", "wire.delay_updates=5")
    assert min(rhythm.updates for rhythm in settled(spread, 1e-6)) == 24, "every fragment has its delay"
    assert rhythm_for_link(settings.algorithm, settings.wire, (), Rhythm(33, 0)) == Rhythm(33, 0), (
        "nothing measured yet"
    )


def test_one_odd_round_changes_nothing() -> None:
    settings, usual = small_settings(*FOUR_TRAINERS, *BY_LINK), RoundCost(UPDATE_SECONDS, 0.2)
    costs = remembered([usual] * 4, RoundCost(UPDATE_SECONDS, 60.0))
    assert len(costs) == 5
    at = Rhythm(20, 0)
    assert rhythm_for_link(settings.algorithm, settings.wire, costs, at) == rhythm_for_link(
        settings.algorithm, settings.wire, [usual] * 5, at
    )


def rounds(settings: Settings, costs: list[RoundCost | None]) -> list[RoundPlan]:
    plans = [plan_round(settings, PlanInputs(PAIR), None, PoolReport())]
    for one in costs:
        # As through a checkpoint and a broadcast: what the next plan stands on is all in the last one.
        last = decode(RoundPlan, encode(plans[-1]))
        plans.append(plan_round(settings, PlanInputs(PAIR), last, PoolReport(cost=one)))
    return plans


def test_plans_carry_what_h_stands_on() -> None:
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK, "algorithm.updates_per_round=8")
    slow = RoundCost(UPDATE_SECONDS, 1.6)
    plans = rounds(settings, [slow, None, slow, slow, slow, slow])
    assert [plan.updates for plan in plans] == [8, 16, 32, 64, 128, 128, 128]
    assert [plan.rhythm.updates for plan in plans] == [plan.updates for plan in plans]
    assert len(plans[-1].costs) == 5
    assert plans[2].costs == (slow,), "a round that was not measured as a whole is not counted"
    fixed = rounds(
        small_settings(*FOUR_TRAINERS, *BY_LINK, "algorithm.round=updates", "algorithm.updates_per_round=20"),
        [slow, slow],
    )
    assert [(plan.updates, plan.costs) for plan in fixed] == [(20, ())] * 3


def test_the_last_round_of_a_budget_is_shorter_and_its_averages_keep_their_times() -> None:
    settings = small_settings(*FOUR_TRAINERS, "algorithm.round=link", "pool.trainers=1", "budget=1000tokens",
                              "algorithm.updates_per_round=8")  # fmt: skip
    plan, last = plan_round(settings, PlanInputs(PAIR), None, PoolReport()), None
    while not plan.stop:
        last, plan = plan, plan_round(settings, PlanInputs(PAIR), plan, PoolReport())
    assert last is not None
    assert last.updates < last.rhythm.updates == 8


def test_costs_begin_anew_where_ranks_are_regrouped() -> None:
    settings = small_settings(*FOUR_TRAINERS, *BY_LINK)
    (*_, known) = rounds(settings, [RoundCost(UPDATE_SECONDS, 1.0)] * 3)
    assert len(known.costs) == 3
    regrouped = dataclasses.replace(known, merge=Merge(0, {0: 1.0}))
    after = plan_round(settings, PlanInputs(PAIR), regrouped, PoolReport(cost=RoundCost(UPDATE_SECONDS, 9.0)))
    assert after.costs == (), "what was reported is of the round before"
    later = plan_round(settings, PlanInputs(PAIR), after, PoolReport(cost=RoundCost(UPDATE_SECONDS, 9.0)))
    assert later.costs == (RoundCost(UPDATE_SECONDS, 9.0),)


def test_what_averaging_is_worth_beside_one_worker_alone() -> None:
    """Noise scale 12, two workers of 4: 1 + 3 over 1 + 1.5 a round's update; 1.6 times as much."""
    assert worth_of_averaging(1.0, 2, 4, 12.0) == pytest.approx(1.6)
    assert worth_of_averaging(0.5, 2, 4, 12.0) == pytest.approx(0.8), "half of the time is spent on the link"
    assert worth_of_averaging(0.75, 4, 4, 0.0) == pytest.approx(0.75), "without noise a second worker is worth nothing"
    assert worth_of_averaging(0.5, 4, 4, math.inf) == pytest.approx(2), (
        "not known: at most as much as there are workers"
    )


def test_what_rounds_cost_by_the_time_that_workers_are_apart() -> None:
    assert drift_factor(Rhythm(1, 0)) == drift_factor(Rhythm(2, 0)) == 1
    assert drift_factor(Rhythm(144, 143)) == pytest.approx(215**0.12), "a delay counts on both sides of a round"


def test_plans_hold_what_averaging_is_worth() -> None:
    settings = small_settings(*FOUR_TRAINERS, "pool.trainers=1", "batching.request=none")

    def planned(num_workers: int, drift: float = 1.0) -> BatchPlan:
        inputs = BatchInputs(num_workers)
        first = first_batch(settings, inputs)
        return next_batch(settings, inputs, first, BatchReport(exposed_share=0.6, drift_factor=drift), 0.5, 0)

    assert planned(2, drift=1.25).worth == pytest.approx(0.64), "workers that drift apart take more updates"
    assert planned(2).worth == pytest.approx(0.8), "noise is not measured: two workers are worth two at most"
    assert planned(1).worth is None, "there is nothing to average"
