"""The steps of a round on one rank; each adds what it did to the rank's report.

Every step goes through the trainers in ascending order: the order of all their collectives. `record_function` names it
in the trace of a profiled round, as the records name where the time went.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.profiler import record_function

from adloco_dist.averaging.checks import RanksDisagreeError
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.averaging.schedule import Action, Event
from adloco_dist.cluster.devices import timed
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import (
    AnchorReport,
    EvaluationReport,
    MeasureReport,
    MergeReport,
    RankReport,
    TrainerReport,
)
from adloco_dist.policy.summary import disagreements
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.coordinate import exchange_positions, exchange_reports
from adloco_dist.round.evaluate import evaluate_anchors
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.regroup import regroup


@record_function("begin")
def begin_round(pool: LocalPool, last: RoundPlan | None, plan: RoundPlan, report: RankReport) -> None:
    """Regroup the ranks if the plan says so, and prepare the workers for their first updates of the round."""
    if last and last.leaving:
        pool.leave(last.leaving)
    if last and plan.merge:
        pool.standing = None  # until it is another pool
        report.merge = regroup(pool, last.remaining, plan)
    for worker in pool.workers:
        worker.begin_round(pool.settings.inner.reset_each_round)
    _renew_sketches(pool, plan)
    pool.stand(plan, 0, report.merge)


def resume_round(pool: LocalPool, plan: RoundPlan, merge: MergeReport) -> RankReport:
    """Prepare the rest of a round that was interrupted; return this rank's report of it so far.

    Rank 0 reports what the merge before the round came to on all ranks.
    """
    _renew_sketches(pool, plan)
    rank = pool.runtime.rank
    return RankReport(rank, plan_digest=plan.digest(), merge=merge if rank == 0 else MergeReport())


def _renew_sketches(pool: LocalPool, plan: RoundPlan) -> None:
    """Draw the random signs of the round, with which gradients are compared."""
    for slot in pool.slots if plan.measures else ():
        slot.flat_model.sketch.renew(pool.settings.seed, plan.round)


def inner(pool: LocalPool, plan: RoundPlan, number: int, report: RankReport, stop: StopRequest) -> bool:
    """Every worker takes its updates up to event `number` of the plan. No communication.

    Returns:
        Whether they have: else the run ends before that event, on all ranks.
    """
    event, place = plan.events[number], f"round {plan.round + 1}"
    pool.runtime.heartbeat.enter(f"{place}: inner phase")
    is_reached = take_updates(pool, plan, number, report, stop)
    pool.runtime.heartbeat.enter(f"{place}: outer step")  # before it waits for ranks that still train
    if event.action is Action.mix:
        return is_reached
    return is_reached and stop.begins((plan.round, number))


@record_function("inner")
def take_updates(pool: LocalPool, plan: RoundPlan, number: int, report: RankReport, stop: StopRequest) -> bool:
    """Every worker takes its updates up to event `number` of the round, unless the run ends before it; whether all have
    done so. No communication."""
    until = plan.events[number].update
    phase = InnerPhase(plan, pool.settings, pool.estimator if plan.measures else None, stop, number)
    for trainer_id, done in phase.run(list(pool.trainers.values()), pool.slots, pool.offload, until).items():
        report.of(trainer_id).inner += done
    return all(
        worker.updates_done >= plan.updates_by(until, trainer.id, worker.id)
        for trainer in pool.trainers.values()
        for worker in trainer.workers
    )


def advance_cursors(pool: LocalPool, plan: RoundPlan, report: RankReport) -> None:
    """Note in the cursors of all trainers what was read in the round."""
    ends: dict[int, Any] = {}
    for trainer_id, trainer in pool.trainers.items():
        workers, local_batch = [worker.id for worker in trainer.workers], plan.batches[trainer_id].local_batch
        ends |= trainer.cursor.ends(workers, local_batch, plan.updates_of_workers(trainer_id))
    if any(cursor.needs_all(plan.layout.num_workers(trainer)) for trainer, cursor in pool.cursors.items()):
        ends = exchange_positions(pool.runtime.control, report, ends)
    for trainer_id, cursor in pool.cursors.items():
        cursor.advance(plan.batches[trainer_id].local_batch, plan.updates_of_workers(trainer_id), ends)


def share_positions(pool: LocalPool, report: RankReport) -> None:
    """Let all ranks know where the streams of all trainers stand; collective, where there are some."""
    if any(cursor.size is None for cursor in pool.cursors.values()):
        known: dict[int, Any] = {}
        for cursor in pool.cursors.values():
            known |= cursor.positions()
        known = exchange_positions(pool.runtime.control, report, known)
        for cursor in pool.cursors.values():
            cursor.learn(known)


@record_function("measure")
def measure(pool: LocalPool, report: RankReport) -> None:
    """Report what was seen of every trainer's first gradients; rank 0 makes statistics of it."""
    for trainer_id, trainer in pool.trainers.items():
        with about(f"trainer {trainer_id}"), timed(pool.runtime.device) as timing:
            sketches = pool.estimator.take(trainer) if pool.estimator else {}
        if sketches and pool.runtime.shard == 0:  # the other ranks of a seat have the same
            num_bytes = sum(map(len, sketches.values())) if pool.runtime.rank else 0
            report.of(trainer_id).measure = MeasureReport(sketches, seconds=timing.seconds, bytes_sent=num_bytes)


@record_function("outer")
def average(pool: LocalPool, plan: RoundPlan, event: Event, report: RankReport) -> None:
    """Average a fragment of every trainer's pseudo-gradients, or let its average travel while updates are computed, one
    trainer's after the other's. Collective."""
    for trainer_id in plan.layout.trainers:
        group = pool.groups.of(plan.layout.ranks(trainer_id))  # on all ranks, for it may have to be formed
        if trainer := pool.trainers.get(trainer_id):
            step = partial(trainer.average, event.fragment, group, plan.rhythm.in_four_bits)
            _report_outer(pool, report, trainer_id, step)
    after = None
    for trainer in pool.trainers.values():
        after = trainer.begin(after)


@record_function("outer")
def mix_in(pool: LocalPool, event: Event, report: RankReport) -> None:
    """Bring a fragment's outer steps to the workers that await them; wait for its averages. No collective."""
    for trainer_id, trainer in pool.trainers.items():
        _report_outer(pool, report, trainer_id, partial(trainer.mix, event.fragment))


@record_function("outer")
def complete_all(pool: LocalPool, report: RankReport) -> None:
    """Wait for all averages under way, and take their outer steps: the anchors are up to date then."""
    for trainer_id, trainer in pool.trainers.items():
        _report_outer(pool, report, trainer_id, trainer.complete)


def compare_anchors(pool: LocalPool, report: RankReport, when: str) -> bool:
    """Make sure that ranks hold the same anchors, as they are after averages that no report has seen; whether all of
    them are finite. Collective.

    Raises:
        RanksDisagreeError: on every rank; it names those that differ.
    """
    trainers = {
        trainer_id: TrainerReport(len(trainer.workers), anchor=_where(trainer))
        for trainer_id, trainer in pool.trainers.items()
    }
    reports = exchange_reports(pool.runtime.control, report, RankReport(pool.runtime.rank, trainers=trainers))
    if errors := disagreements(reports, pool.settings.pool.ranks_per_worker):
        raise RanksDisagreeError(f"{when}: {'; '.join(errors)}")
    return all(share.anchor.is_finite for one in reports for share in one.trainers.values())


def _where(trainer: Trainer) -> AnchorReport:
    """Where a trainer stands between two rounds."""
    return AnchorReport(trainer.checksum(), trainer.is_finite, trainer.cursor.position)


def _report_outer(pool: LocalPool, report: RankReport, trainer_id: int, step: Callable[[], OuterStepReport]) -> None:
    """Take a part of a trainer's outer step, and add what it did to the rank's report."""
    with about(f"trainer {trainer_id}"), timed(pool.runtime.device) as timing:
        done = step()
    report.of(trainer_id).outer += replace(done, seconds=timing.seconds)


@record_function("outer")
def average_anchors(pool: LocalPool, plan: RoundPlan, report: RankReport) -> None:
    """Let every trainer's anchor count in the average of its anchors; no communication."""
    for trainer_id, trainer in pool.trainers.items():
        with timed(pool.runtime.device) as timing:
            trainer.average_anchors(plan.pool_tokens, plan.round_tokens)
        report.of(trainer_id).outer += OuterStepReport(seconds=timing.seconds)


def opening_report(pool: LocalPool, layout: Layout) -> RankReport:
    """Report the anchors before the first round: all ranks must hold the same. They are also evaluated: their losses
    are where the run's curves start."""
    is_evaluated = pool.settings.evaluation.every is not None
    evaluations = evaluate_anchors(pool, layout, layout.trainers) if is_evaluated else {}
    trainers = {
        trainer_id: TrainerReport(
            len(trainer.workers),
            anchor=_where(trainer),
            evaluation=evaluations.get(trainer_id, EvaluationReport()),
        )
        for trainer_id, trainer in pool.trainers.items()
    }
    return RankReport(pool.runtime.rank, capacity=pool.capacity, trainers=trainers)


def report_round(pool: LocalPool, plan: RoundPlan, report: RankReport, updates_before: int) -> None:
    """Note where the trainers stand at the end of a round, and what the rank used. The workers had taken
    `updates_before` of its updates when this start of the run began; a rest of a round has no speed."""
    evaluations = evaluate_anchors(pool, plan.layout, plan.layout.trainers) if plan.evaluate else {}
    for trainer_id, trainer in pool.trainers.items():
        part = report.of(trainer_id)
        part.num_workers = len(trainer.workers)
        part.anchor = _where(trainer)
        part.evaluation = evaluations.get(trainer_id, EvaluationReport())
    report.trainers = {trainer_id: report.of(trainer_id) for trainer_id in pool.trainers}  # others have ended
    updates = sum(worker.updates_done for worker in pool.workers)
    if updates and not updates_before:
        report.update_seconds = round(sum(part.inner.seconds for part in report.trainers.values()) / updates, 6)
    report.capacity, report.resources = pool.capacity, pool.runtime.monitor.take()
    report.notes = pool.splits.train.take_notes()
