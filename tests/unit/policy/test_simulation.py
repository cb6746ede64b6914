"""The simulated clock, by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.averaging.sums import has_owners
from adloco_dist.config import Settings, WireFormat
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import FOUR_BITS_RATIO
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import (
    EvaluationReport,
    InnerReport,
    MeasureReport,
    RankReport,
    TrainerReport,
)
from adloco_dist.policy.simulation import exchanges, round_seconds, simulated
from adloco_dist.policy.summary import pool_report
from helpers.support import FOUR_TRAINERS, small_settings

SIMULATED = (
    "simulation.update_seconds=0.5", "simulation.sequence_seconds=0.25", "simulation.bytes_per_second=100",
    "simulation.latency_seconds=0.125", "pool.trainers=1", "algorithm.updates_per_round=10", "batching.local_batch=2",
)  # fmt: skip
"""An update of 2 sequences takes a second."""
PAIR = Layout.one_rank_per_worker({0: (0, 1)})


def reported(num_bytes: int, gradient_bytes: int = 0, workers: Sequence[int] = (1, 1)) -> list[RankReport]:
    """As measured: every step took 1000 seconds, and an evaluation, too."""
    share = TrainerReport(
        inner=InnerReport(seconds=1000, loss_sum=2.0),
        measure=MeasureReport(seconds=1000, bytes_sent=50),
        outer=OuterStepReport(seconds=1000, bytes_sent=num_bytes, gradient_bytes_sent=gradient_bytes),
        evaluation=EvaluationReport(Evaluation(3.0, 1), 1000),
    )
    return [
        RankReport(rank, control_seconds=1000, update_seconds=1000, trainers={0: _with_workers(share, count)})
        for rank, count in enumerate(workers)
    ]


def _with_workers(share: TrainerReport, count: int) -> TrainerReport:
    return TrainerReport(count, share.inner, share.measure, share.outer, share.anchor, share.evaluation)


def planned(settings: Settings, layout: Layout = PAIR) -> RoundPlan:
    return plan_round(settings, PlanInputs(layout), None, PoolReport())


@pytest.mark.parametrize(
    ("overrides", "num_bytes", "outer", "transfer"),
    [
        ((), 400, 4.75, 0.0),  # waited for: 4 s, half a second for sketches, and two latencies
        (("wire.delay_updates=3",), 400, 1.75, 4.75),
        (("wire.delay_updates=5",), 400, 0.0, 4.75),
        # Each of two fragments takes 2.5 s.
        (("wire.delay_updates=2", "wire.fragments=2"), 400, 1.0, 5.0),
        (("simulation.bytes_per_second=null",), 400, 0.25, 0.0),
        # What a host computes for an average is not hidden.
        (("wire.delay_updates=5", "simulation.average_seconds=0.5"), 400, 0.5, 4.75),
        (("simulation.average_seconds=0.5",), 0, 0.0, 0.0),  # nothing travels inside of a rank
    ],
)
def test_seconds_are_counted(overrides: tuple[str, ...], num_bytes: int, outer: float, transfer: float) -> None:
    settings = small_settings(*FOUR_TRAINERS, *SIMULATED, *overrides)
    first, second = simulated(settings.simulation, settings.wire, planned(settings), reported(num_bytes))
    share = first.trainers[0]
    assert (share.inner.seconds, first.update_seconds) == (10, 1)
    assert (share.outer.seconds, share.outer.transfer_seconds) == (outer, transfer)
    assert first.control_seconds == second.control_seconds == 0.0, "reports and plans travel meanwhile"
    assert share.evaluation.seconds == 0
    assert share.evaluation.sums == Evaluation(3.0, 1), "what was found is kept"
    assert share.inner.loss_sum == 2.0
    assert round_seconds([first, second]) == pytest.approx(10 + outer)


@pytest.mark.parametrize("format", [format for format in WireFormat if format is not WireFormat.fp32])
def test_the_clock_counts_the_exchanges_of_averages(format: WireFormat) -> None:
    assert [exchanges(format, ranks) for ranks in (2, 3, 9)] == [1 + has_owners(ranks) for ranks in (2, 3, 9)]


def test_ranks_wait_for_the_slowest() -> None:
    """Rank 0 has two workers, rank 1 one: it waits as long as it takes to take the updates of another."""
    settings = small_settings(*FOUR_TRAINERS, *SIMULATED, "pool.workers_per_trainer=3")
    layout = Layout({0: ((0,), (0,), (1,))})
    reports = simulated(settings.simulation, settings.wire, planned(settings, layout), reported(400, workers=(2, 1)))
    assert [report.trainers[0].inner.seconds for report in reports] == [20, 10]
    assert [report.update_seconds for report in reports] == [1, 1]
    assert [report.control_seconds for report in reports] == [0.0, 10.0]
    cost = pool_report(reports, planned(settings, layout), 0.0).cost
    assert cost is not None
    assert cost.update_seconds == 2, "both of the slowest rank's workers"
    assert cost.exposed_seconds == pytest.approx(4.75), "what nobody is spared, once a round"


def test_a_round_that_measures_gradients_counts_as_the_rounds_that_do_not() -> None:
    """What it takes more, two seconds here, is no cost of the rounds for which the next batch is chosen."""
    settings = small_settings(*FOUR_TRAINERS, *SIMULATED, "algorithm.round=link")
    usual, slow = ([RankReport(0, trainers={0: TrainerReport(1, InnerReport(seconds=10), outer=OuterStepReport(
        seconds=seconds))}, update_seconds=1)] for seconds in (1.0, 3.0))  # fmt: skip
    plan = replace(planned(settings, Layout.one_rank_per_worker({0: (0,)})), updates=10)
    cost = pool_report(usual, plan, 0.0).cost
    assert cost is not None
    for costs, seconds, share in (((), 1.3, 3 / 13), ((cost,) * 4, 1.1, 1 / 11)):
        (found,) = pool_report(slow, replace(plan, costs=costs), 0.0).batches.values()
        assert (found.seconds_per_update, found.exposed_share) == (pytest.approx(seconds), pytest.approx(share))


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_arrives_has_the_format_in_which_it_left(fragments: int) -> None:
    """Signs until the last round, 4 bits from this one on: another fragment than the first leaves and arrives in it."""
    adaptive = ("wire=adaptive", "wire.delay_updates=2", f"wire.fragments={fragments}", "algorithm=localsgd")
    settings = small_settings(*FOUR_TRAINERS, *SIMULATED, *adaptive)
    plan = planned(settings)
    plan = replace(plan, rhythm=replace(plan.rhythm, in_four_bits=True))
    of_four_bits, exchange = 4.0, 0.125 * fragments  # 350 bytes and 50 of sketches are sent; each has its latency
    signs = (3.5 / FOUR_BITS_RATIO, (3.5 / FOUR_BITS_RATIO + 3.5) / 2)[fragments - 1]
    for was_in_four_bits, seconds, share in ((True, of_four_bits, 1.0), (False, signs + 0.5, 1 - 1 / fragments)):
        now = replace(plan, was_in_four_bits=was_in_four_bits)
        reports = simulated(settings.simulation, settings.wire, now, reported(350))
        cost = pool_report(reports, now, 0.0).cost
        assert cost is not None
        assert cost.transfer_seconds == pytest.approx(seconds + 2 * exchange, abs=0.02)
        assert cost.four_bits_share == share
    assert plan_round(settings, PlanInputs(PAIR), plan, PoolReport()).was_in_four_bits


def test_averages_of_gradients_travel_during_two_thirds_of_an_update() -> None:
    settings = small_settings(*FOUR_TRAINERS, *SIMULATED)
    (first, _) = simulated(settings.simulation, settings.wire, planned(settings), reported(0, gradient_bytes=2000))
    assert first.trainers[0].outer.seconds == pytest.approx(20 - 10 * 2 / 3)
