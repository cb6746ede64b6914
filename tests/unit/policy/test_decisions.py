"""Plans, reports and schedules: pure functions against hand-worked numbers."""

import dataclasses
import json
import math

import pytest

from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.config import InnerSettings, RateScaling, Schedule, Settings
from adloco_dist.config.compose import compose
from adloco_dist.messages import decode, encode
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.batch import BatchReport
from adloco_dist.policy.evaluation import PERPLEXITY, Evaluation
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import Rhythm
from adloco_dist.policy.merging import Merge
from adloco_dist.policy.plan import NONFINITE, PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import (
    AnchorReport,
    EvaluationReport,
    InnerReport,
    RankReport,
    TrainerReport,
)
from adloco_dist.policy.schedule import UPDATES_ON_ITS_OWN, Progress, rate_scale, rate_share, workers_in_update
from adloco_dist.policy.summary import disagreements
from adloco_dist.pool.gradient import micro_batch_size
from adloco_dist.run.recording import round_rows

PREMISES = PlanInputs(Layout.one_rank_per_worker({0: (0, 1), 1: (1,)}))


def settings(*overrides: str) -> Settings:
    """3 workers in all, 2 sequences of 10 tokens each, 5 updates a round: 60 tokens per update, 300 per round."""
    return compose(
        ["batching.local_batch=2", "batching.request=none", "data.sequence_length=10",
         "algorithm.updates_per_round=5", *overrides]
    )  # fmt: skip


def plans(settings: Settings, count: int, seconds: float = 0.0) -> list[RoundPlan]:
    """Plans of rounds that take so many seconds each: the report of a round decides the plan of the next but one."""
    made = [plan_round(settings, PREMISES, None, PoolReport())]
    for number in range(1, count):
        ended = PoolReport(seconds * (number - 1), seconds, updates=5, outer_steps=2)
        made.append(plan_round(settings, PREMISES, made[-1], ended if number > 1 else None))
    return made


def test_a_budget_in_tokens_ends_with_the_update_that_spends_it() -> None:
    made = plans(settings("budget=700tokens"), 4)
    assert [plan.pool_tokens for plan in made] == [0, 300, 600, 720]
    assert [plan.updates for plan in made[:3]] == [5, 5, 2]
    assert [plan.stop for plan in made] == [None, None, None, "budget=700tokens reached"]
    assert made[1].progress == Progress(60, 300 / 700, 60 / 700)


def test_budgets_in_rounds_and_seconds() -> None:
    assert [plan.stop is None for plan in plans(settings("budget=2rounds"), 3)] == [True, True, False]


def test_a_budget_in_seconds_ends_when_the_round_under_way_will_have_spent_it() -> None:
    timed = plans(settings("budget=10seconds"), 4, seconds=4.0)
    assert [plan.seconds for plan in timed] == [0.0, 0.0, 8.0, 12.0], "of the first two nothing is known"
    assert [plan.stop for plan in timed] == [None, None, None, "budget=10seconds reached"]
    assert timed[2].progress.fraction == pytest.approx(0.8)
    assert timed[2].progress.fraction_per_update == pytest.approx(0.4 / 5)


def test_the_time_of_a_round_under_way_follows_its_updates_and_time_never_runs_back() -> None:
    before, last = plans(settings("budget=100seconds"), 2)
    longer = dataclasses.replace(last, updates=10, seconds=3.0)
    found = PoolReport(seconds=4.0, round_seconds=4.0, updates=before.updates)
    assert plan_round(settings("budget=100seconds"), PREMISES, longer, found).seconds == 4.0 + 2 * 4.0
    late = dataclasses.replace(longer, seconds=20.0)
    assert plan_round(settings("budget=100seconds"), PREMISES, late, found).seconds == 20.0


def test_a_budget_that_is_spent_without_an_outer_step_is_no_end() -> None:
    def ended(*nonfinite: set[int]) -> RoundPlan:
        plan, plan_after = plans(settings("budget=3rounds"), 2)
        for trainers in nonfinite:
            report = PoolReport(outer_steps=2 - len(trainers), nonfinite=frozenset(trainers), updates=plan.updates)
            found = decode(PoolReport, encode(report))
            plan, plan_after = plan_after, plan_round(settings("budget=3rounds"), PREMISES, plan_after, found)
        return plan_after

    assert ended({0, 1}).stop is None, "two rounds, of which one is known"
    nothing = ended({0, 1}, {0, 1})
    assert (nothing.stop, nothing.outer_steps, nothing.checkpoint) == (NONFINITE, 0, True)
    assert (
        "trainer 0 in 2 rounds in a row, trainer 1 in 2 rounds in a row, no outer step" in nothing.nonfinite_in_words()
    )
    once = ended({0, 1}, {0})
    assert (once.stop, once.outer_steps) == ("budget=3rounds reached", 1)


def test_differing_anchors_end_the_run() -> None:
    broken = plan_round(settings("budget=9rounds"), PREMISES, None, PoolReport(errors=["a", "b"]))
    assert broken.stop
    assert broken.error == "a; b"


def test_a_plan_survives_its_message() -> None:
    (plan,) = plans(settings("budget=2rounds"), 1)
    assert decode(RoundPlan, json.loads(json.dumps(encode(plan)))) == plan
    assert [plan.total_batch(trainer) for trainer in (0, 1)] == [4, 2]


def test_evaluation_counts_rounds() -> None:
    made = plans(settings("budget=99rounds", "evaluation.every=2rounds"), 5)
    assert [plan.evaluate for plan in made] == [False, True, False, True, False]
    assert not any(plan.evaluate for plan in plans(settings("budget=99rounds", "evaluation.every=null"), 5))


def test_the_ranks_that_differ_are_named() -> None:
    def report(rank: int, *checksums: tuple[int, list[int]]) -> RankReport:
        reports = {trainer: TrainerReport(anchor=AnchorReport(sums)) for trainer, sums in checksums}
        return RankReport(rank, trainers=reports)

    agreed = [report(0, (0, [1, 2])), report(1, (0, [1, 2]), (1, [7, 7]))]
    assert disagreements(agreed) == []
    torn = [report(0, (0, [1, 2])), report(1, (0, [1, 3])), report(2, (0, [1, 2]))]
    assert disagreements(torn) == ["the anchor of trainer 0 differs between ranks {0,2} and rank 1"]


def test_shares_of_several_ranks_add_up_to_one_record_per_trainer() -> None:
    plan, next_plan = plans(settings("budget=2rounds"), 2)

    def part(loss: float, inner: float, outer: float, evaluated: Evaluation) -> TrainerReport:
        return TrainerReport(
            1,
            InnerReport(loss_sum=loss, seconds=inner),
            outer=OuterStepReport(num_finite=2, seconds=outer, bytes_sent=100),
            anchor=AnchorReport(position=20),
            evaluation=EvaluationReport(evaluated),
        )

    first = part(2.0, 1.0, 0.5, Evaluation(30.0, 10, figure=PERPLEXITY))
    second = part(4.0, 3.0, 0.1, Evaluation(10.0, 10, figure=PERPLEXITY))
    alone = TrainerReport(1, InnerReport(loss_sum=5.0), outer=OuterStepReport(num_finite=1))
    reports = [
        RankReport(0, control_seconds=0.25, control_bytes_sent=10, trainers={0: first}),
        RankReport(1, control_seconds=0.75, control_bytes_sent=11, trainers={0: second, 1: alone}),
    ]
    rows = round_rows(settings("budget=2rounds"), plan, next_plan, reports, 12.5, 1e-3)
    trainer0, trainer1 = (encode(row) for row in rows)
    assert (trainer0["round"], trainer0["trainer"], trainer0["ranks"], trainer0["workers"]) == (1, 0, [0, 1], 2)
    assert (trainer0["updates"], trainer0["total_batch"], trainer0["sequences"], trainer0["tokens"]) == (5, 4, 20, 200)
    assert trainer0["train_loss"] == 3.0
    assert trainer0["validation_loss"] == 2.0
    assert trainer0["validation_perplexity"] == pytest.approx(math.exp(2.0))
    assert trainer0["seconds"] == {"inner": 3.0, "outer": 0.5, "control": 0.75}
    assert trainer0["bytes_sent"] == {"outer": 200, "control": 15}
    assert trainer1["bytes_sent"] == {"control": 6}
    assert "validation_loss" not in trainer1


def test_learning_rates() -> None:
    cosine = InnerSettings(warmup_fraction=0.1, final_lr_fraction=0.2, schedule=Schedule.cosine)
    start = Progress(tokens_per_update=20, fraction=0.0, fraction_per_update=1e-9)
    assert rate_share(cosine, start, 0) == pytest.approx(0.1), "from a tenth"
    rising = Progress(tokens_per_update=20, fraction=0.02, fraction_per_update=0.02)
    flat = dataclasses.replace(cosine, schedule=Schedule.constant)
    assert [rate_share(flat, rising, update) for update in range(5)] == pytest.approx([0.4, 0.6, 0.8, 1, 1])
    later = Progress(tokens_per_update=20, fraction=0.25, fraction_per_update=0.25)
    assert rate_share(cosine, later, 1) == pytest.approx(0.2 + 0.8 * 0.5)
    assert rate_share(cosine, later, 3) == pytest.approx(0.2)
    assert rate_share(cosine, later, 9) == pytest.approx(0.2), "past the budget the rate stays"
    wsd = dataclasses.replace(cosine, schedule=Schedule.wsd, decay_fraction=0.5)
    assert [rate_share(wsd, later, update) for update in range(4)] == pytest.approx([1, 1, 0.2 + 0.8 * 0.5, 0.2])
    assert rate_share(wsd, rising, 1) == pytest.approx(0.6), "the warm-up is the same"
    constant = InnerSettings(warmup_fraction=0.0, schedule=Schedule.constant)
    assert rate_share(constant, later, 3) == 1.0


def test_the_rate_follows_the_workers_that_average() -> None:
    """Between all of them, who average at every update, and one, who is on its own for long."""
    own = round(UPDATES_ON_ITS_OWN)
    for workers in (1, 2, 8):
        counts = [workers_in_update(workers, Rhythm(updates, 0)) for updates in (1, 2, 5, 20, own + 1, 10 * own)]
        assert counts == sorted(counts, reverse=True)
        assert (counts[0], *counts[-2:]) == (workers, 1, 1)
    assert workers_in_update(2, Rhythm(3, 2)) == workers_in_update(2, Rhythm(7, 0)), "a delay counts twice"
    assert [rate_scale(scaling, 4.0) for scaling in RateScaling] == [1, 2, 4]


def test_passes_are_as_few_as_capacity_allows_and_equal_but_the_last() -> None:
    for batch in range(1, 40):
        assert micro_batch_size(batch, None) == batch
        for capacity in range(1, 45):
            size = micro_batch_size(batch, capacity)
            num_micro_batches = math.ceil(batch / size)
            assert size <= capacity
            assert num_micro_batches == math.ceil(batch / capacity)
            assert 0 < batch - (num_micro_batches - 1) * size <= size


def test_what_was_reported_before_a_merge_says_nothing_of_the_trainer_that_it_left() -> None:
    """The reports of the round before a merge arrive when the merged pool has its plan."""
    asked = settings("budget=9rounds", "batching.request=norm_test", "batching.growth_limit=100", "batching.span=0")
    before = plan_round(asked, PREMISES, None, PoolReport())
    merge = Merge(0, {0: 0.5, 1: 0.5})
    merged = dataclasses.replace(
        before, round=1, merge=merge, layout=merge.layout_after(before.layout), batches={0: before.batches[0]}
    )
    noisy = GradientStatistics(640.0, 1.0, 4.0, 1.0, 0.0, True)
    measured = {trainer: BatchReport(noisy, seconds_per_update=1.0, local_batch=2) for trainer in (0, 1)}
    found = PoolReport(10.0, 10.0, 5, batches=measured, capacities=[7, 7, 7], nonfinite=frozenset({1}), outer_steps=2)
    after = plan_round(asked, PREMISES, merged, found)
    assert after.batches[0].request == merged.batches[0].request
    assert after.batches[0].batch_limit == merged.batches[0].batch_limit, "nobody had probed"
    assert after.nonfinite_rounds == {}
    later = plan_round(asked, PREMISES, after, dataclasses.replace(found, probed=(0, 1), batches={0: measured[0]}))
    assert later.batches[0].request == pytest.approx(640 / 0.8**2)
    assert later.batches[0].batch_limit == 7
