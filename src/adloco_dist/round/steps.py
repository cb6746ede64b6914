"""The steps of a round on one rank; each returns its fragment of the rank's report, by trainer.

Every step goes through the trainers in ascending order: the order of all their collectives. `record_function` names it
in the trace of a profiled round, as the records name where the time went.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

from msgspec.structs import replace
from torch.profiler import record_function

from adloco_dist.averaging.background import Background
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.evaluation import subsets
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import (
    AnchorReport,
    EvaluationReport,
    InnerReport,
    MeasureReport,
    OuterReport,
    RankReport,
    TrainerReport,
)
from adloco_dist.pool.timing import timed
from adloco_dist.round.coordinate import ask_all, exchange_all, exchange_ends
from adloco_dist.round.evaluate import evaluate, part_of
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.local_pool import LocalPool, round_ends
from adloco_dist.round.outer import complete, mix

_Report = TypeVar("_Report", InnerReport, OuterReport)


@record_function("inner")
def inner(
    pool: LocalPool, plan: RoundPlan, stop: StopRequest, until: int, is_first: bool, is_resumed: bool
) -> dict[int, InnerReport]:
    """Every worker takes its updates up to the next average, or the next that reaches it; no communication.

    Args:
        stop: ends the updates before they are complete.
        until: updates of the round that are taken then.
        is_first: these are the first updates of this round, or of this start.
        is_resumed: the workers were in the middle of the round when the run started.
    """
    estimators = pool.estimators if is_first and plan.measures else {}
    if estimators:
        for slot in pool.slots:
            slot.sketch.renew(pool.settings.seed, plan.round)
    phase = InnerPhase(plan, pool.settings, estimators, stop, is_resumed or not is_first)
    return phase.run(list(pool.trainers.values()), pool.slots, pool.offload, until)


def inner_to_average(
    pool: LocalPool, plan: RoundPlan, report: RankReport, stop: StopRequest, until: int, is_first: bool,
    is_resumed: bool,
) -> tuple[dict[int, InnerReport], bool]:  # fmt: skip
    """As `inner`, up to an average in the middle of a round; and whether all ranks come to it. Collective.

    Ranks tell each other before the last update, which they take in any case then: by its end they have heard, and
    nobody waits who is less than an update ahead.
    """
    told_at = max(until - 1, 1)
    done = inner(pool, plan, stop, told_at, is_first, is_resumed)
    all_come = all_there(pool, plan, told_at, report)
    if has_reached(pool, plan, told_at):
        done = together(done, inner(pool, plan, StopRequest(), until, False, is_resumed))
    return done, all_come()


def together(earlier: dict[int, _Report], later: dict[int, _Report]) -> dict[int, _Report]:
    """The reports of steps that followed one another in a round, added up, by trainer."""
    return {**earlier, **{key: earlier[key] + value if key in earlier else value for key, value in later.items()}}


def reached_by_all(pool: LocalPool, plan: RoundPlan, report: RankReport) -> int:
    """The last of the round's boundaries that the workers of all ranks have reached; 0: none. Collective.

    Args:
        report: the cost of the exchange is added to it.
    """
    boundaries = [update for update in pool.schedule(plan).boundaries(plan.updates) if has_reached(pool, plan, update)]
    return min(exchange_all(pool.runtime.control, report, max(boundaries, default=0)))


def all_there(pool: LocalPool, plan: RoundPlan, until: int, report: RankReport) -> Callable[[], bool]:
    """Ask whether the workers of all ranks have taken so many updates of the round, or their share of them. Collective.

    Args:
        report: the cost of the exchange is added to it.

    Returns:
        What waits for the others, and has the answer.
    """
    return ask_all(pool.runtime.control, report, has_reached(pool, plan, until))


def has_reached(pool: LocalPool, plan: RoundPlan, update: int) -> bool:
    """Whether this rank's workers have taken so many updates of the round; if not, it was asked to stop."""
    return all(
        worker.updates_done >= plan.updates_by(update, trainer.id, worker.id)
        for trainer in pool.trainers.values()
        for worker in trainer.workers
    )


def advance_cursors(pool: LocalPool, plan: RoundPlan, report: RankReport) -> None:
    """Note in the cursors of all trainers what was read in the round. Collective.

    Args:
        report: the cost of the exchange is added to it.
    """
    control = pool.runtime.control
    has_streams = any(cursor.size is None for cursor in pool.cursors.values())  # the same on all ranks
    ends = exchange_ends(control, report, round_ends(pool, plan)) if has_streams else {}
    for trainer_id, cursor in pool.cursors.items():
        updates, num_workers = plan.updates, plan.layout.num_workers(trainer_id)
        if trainer_id in plan.worker_updates:
            updates, num_workers = sum(plan.worker_updates[trainer_id]), 1
        cursor.advance(updates, num_workers, plan.batches[trainer_id].local_batch, ends)


@record_function("measure")
def measure(pool: LocalPool, plan: RoundPlan) -> dict[int, MeasureReport]:
    """Exchange what estimators have seen of every trainer's first gradients. Collective."""
    measured: dict[int, MeasureReport] = {}
    for trainer_id in plan.layout.trainers:
        group = pool.groups.of(plan.layout.ranks(trainer_id))  # on all ranks, for it may have to be formed
        if plan.measures and (estimator := pool.estimators.get(trainer_id)):
            with about(f"trainer {trainer_id}"), timed(pool.runtime.device) as timing:
                found = estimator.measure(pool.trainers[trainer_id], plan.layout, group)
            measured[trainer_id] = MeasureReport(found.statistics, timing.seconds, found.bytes_sent)
    return measured


@record_function("outer")
def average(pool: LocalPool, plan: RoundPlan, fragment: int) -> dict[int, OuterReport]:
    """Average a fragment of every trainer's pseudo-gradients, or prepare to. Collective."""
    device, averaged = pool.runtime.device, dict[int, OuterReport]()
    for trainer_id in plan.layout.trainers:
        group = pool.groups.of(plan.layout.ranks(trainer_id))  # on all ranks, for it may have to be formed
        if trainer_id not in pool.trainers:
            continue
        trainer = pool.trainers[trainer_id]
        with about(f"trainer {trainer_id}"), timed(device) as timing:
            step = pool.algorithm.average(trainer, group, fragment)
        averaged[trainer_id] = replace(step, seconds=timing.seconds)
    return averaged


def begin_averages(pool: LocalPool) -> None:
    """Let what `average` has prepared travel, one trainer's after the other's, while updates are computed.

    At the end of a round that is when the next plan has come: on a slow link report and plan would wait behind it.
    """
    after: Background | None = None
    for trainer in pool.trainers.values():
        if trainer.under_way and isinstance(trainer.under_way.average, Background):
            after = trainer.under_way.average.begin(after)


@record_function("outer")
def mix_in(pool: LocalPool, fragment: int) -> dict[int, OuterReport]:
    """Bring the outer steps of a fragment to the workers that await them; wait for its averages. No collective."""
    mixed: dict[int, OuterReport] = {}
    for trainer_id, trainer in pool.trainers.items():
        with about(f"trainer {trainer_id}"), timed(pool.runtime.device) as timing:
            step = mix(trainer, fragment)
        mixed[trainer_id] = replace(step, seconds=timing.seconds)
    return mixed


@record_function("outer")
def complete_all(pool: LocalPool) -> dict[int, OuterReport]:
    """Wait for all averages under way, and take their outer steps: the anchors are the newest then."""
    completed: dict[int, OuterReport] = {}
    for trainer_id, trainer in pool.trainers.items():
        with about(f"trainer {trainer_id}"), timed(pool.runtime.device) as timing:
            step = complete(trainer)
        completed[trainer_id] = replace(step, seconds=timing.seconds)
    return completed


def average_anchors(pool: LocalPool, plan: RoundPlan) -> None:
    """Let every trainer's anchor count in the average of its anchors; no communication."""
    for trainer in pool.trainers.values():
        trainer.average_anchors(plan.pool_tokens, plan.round_tokens)


@record_function("evaluation")
def evaluate_anchors(
    pool: LocalPool, layout: Layout, only: Collection[int] | None = None
) -> dict[int, EvaluationReport]:  # fmt: skip
    """Evaluate every trainer's anchor, or their average, on this rank's part of the validation sequences.

    Args:
        only: these trainers alone.
    """
    validation, reports = pool.splits.validation, {}
    chosen = subsets(validation.num_sequences, pool.settings.evaluation).curve
    for trainer_id, trainer in pool.trainers.items():
        if only is not None and trainer_id not in only:
            continue
        part = part_of(pool.runtime.seat, trainer_id, layout)
        with timed(pool.runtime.device) as timing:
            sums = evaluate(
                pool.flat_model,
                pool.objective,
                trainer.result,
                validation,
                chosen,
                pool.settings.evaluation.batch,
                part,
            )
        reports[trainer_id] = EvaluationReport(sums, timing.seconds)
    return reports


def opening_report(pool: LocalPool, layout: Layout, is_new: bool) -> RankReport:
    """Report the anchors before the first round of a start: all ranks must hold the same.

    Args:
        is_new: the run begins, and the anchors' loss is where its curves start.
    """
    is_evaluated = is_new and pool.settings.evaluation.draws_curves
    evaluations = evaluate_anchors(pool, layout) if is_evaluated else {}
    trainers = {
        trainer_id: TrainerReport(
            len(trainer.workers),
            anchor=AnchorReport(trainer.checksum()),
            evaluation=evaluations.get(trainer_id, EvaluationReport()),
        )
        for trainer_id, trainer in pool.trainers.items()
    }
    return RankReport(pool.runtime.rank, capacity=pool.capacity, trainers=trainers)


def trainer_reports(
    pool: LocalPool,
    inner_reports: dict[int, InnerReport],
    measure_reports: dict[int, MeasureReport],
    outer_reports: dict[int, OuterReport],
    evaluation_reports: dict[int, EvaluationReport],
) -> dict[int, TrainerReport]:
    """The fragments of all steps, put together."""
    return {
        trainer_id: TrainerReport(
            len(trainer.workers),
            inner_reports[trainer_id],
            measure_reports.get(trainer_id, MeasureReport()),
            outer_reports[trainer_id],
            AnchorReport(trainer.checksum(), trainer.is_finite, trainer.cursor.position),
            evaluation_reports.get(trainer_id, EvaluationReport()),
        )
        for trainer_id, trainer in pool.trainers.items()
    }
