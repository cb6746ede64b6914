"""The loop (docs/architecture.md, "A round"): report, plan, record, merge, and a round of updates and outer steps."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from adloco_dist.averaging.checks import RanksDisagreeError
from adloco_dist.checkpoint.saving import Checkpoints
from adloco_dist.checkpoint.state import Phase, RunState
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.checkpoints import CheckpointId
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, PlanInputs, RoundPlan
from adloco_dist.policy.report import InnerReport, MeasureReport, MergeReport, OuterReport, RankReport
from adloco_dist.round.coordinate import Coordinator, merged_reports
from adloco_dist.round.finish import finish
from adloco_dist.round.local_pool import LocalPool
from adloco_dist.round.regroup import regroup
from adloco_dist.round.steps import (
    advance_cursors,
    all_there,
    average,
    average_anchors,
    begin_averages,
    complete_all,
    evaluate_anchors,
    has_reached,
    inner,
    inner_to_average,
    measure,
    mix_in,
    opening_report,
    reached_by_all,
    together,
    trainer_reports,
)
from adloco_dist.run.journal import Journal
from adloco_dist.run.profiler import RoundProfiler
from adloco_dist.run.rows import round_records
from adloco_dist.terminal import reported_wait

log = logging.getLogger(__name__)
InnerReports = dict[int, InnerReport]
OuterReports = dict[int, OuterReport]


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind."""

    stop: str
    """Why it ended."""
    pool: LocalPool
    """What this rank holds."""
    plan: RoundPlan
    """The last plan."""
    result: dict[str, Any] | None = None
    """The evaluation of all candidates and which one was chosen, the same on every rank; None: stopped early."""
    weights: torch.Tensor | None = None
    """The flat weights that were chosen, on rank 0; where ranks hold a worker together, on the first such ranks."""


def train(
    pool: LocalPool, inputs: PlanInputs, journal: Journal, stop: StopRequest, checkpoints: Checkpoints | None = None,
    resumed: RunState | None = None, profiler: RoundProfiler | None = None,
) -> Outcome:  # fmt: skip
    """Train the pool until its budget is spent or a rank was asked to stop.

    Collective: every rank calls it with equal settings, data and module.

    Args:
        checkpoints: takes the state of the run when a plan says so, or when the run is stopped; None: nothing is kept.
        resumed: where the run resumes, of which `pool` holds the tensors; None: it begins.
        profiler: profiles chosen rounds; None: no round is.

    Raises:
        RanksDisagreeError: on every rank, when ranks hold different anchors of a trainer or acted on different plans.
    """
    runtime, control = pool.runtime, pool.runtime.control
    profiler = profiler or RoundProfiler(range(0), Path(), runtime)
    phase, last, plan, seconds, saved = Phase.report, None, None, 0.0, None
    if resumed:
        phase, plan, seconds, saved = resumed.phase, resumed.plan, resumed.seconds, resumed.pool
    coordinator = Coordinator(pool.settings, inputs, seconds, saved)
    report = opening_report(pool, inputs.layout, is_new=resumed is None)
    while True:
        if phase is Phase.report:
            report.stop_requested = stop.requested
            last, (plan, report) = plan, coordinator.plan_next(control, report, plan)
            begin_averages(pool)
            completed = complete_all(pool) if plan.needs_newest_anchors else {}
            record(pool, coordinator, last, plan, journal, checkpoints, report)
            if plan.stop:
                break
        else:
            assert plan and resumed
            merge = resumed.merge if runtime.rank == 0 else MergeReport()
            report, completed = RankReport(runtime.rank, plan_digest=plan.digest(), merge=merge), {}
        profiler.enter(plan.round + 1)
        with about(f"round {plan.round + 1}"), record_function(f"round {plan.round + 1}"):
            if last and plan.regrouping:
                report.merge = regroup(pool, last.layout, plan)
            is_complete = run_round(pool, plan, report, completed, stop, is_resumed=phase is Phase.inner)
        if not is_complete:
            profiler.end()
            return interrupted(pool, coordinator, plan, report, checkpoints)
        phase = Phase.report
        report.is_writing = checkpoints is not None and checkpoints.is_writing
        log.info("round %d: %s", plan.round + 1, report.in_words())
    profiler.end()
    if plan.stop in (INTERRUPTED, NONFINITE):
        return Outcome(plan.stop, pool, plan)
    return Outcome(plan.stop, pool, plan, *evaluated_candidates(pool, plan))


def run_round(
    pool: LocalPool, plan: RoundPlan, report: RankReport, completed: OuterReports, stop: StopRequest,
    is_resumed: bool = False,
) -> bool:  # fmt: skip
    """Take the updates and the outer steps of one round, and note what is reported of them.

    Args:
        report: that of this rank; takes every step's fragment.
        completed: outer steps of the last round that were completed since its report.
        is_resumed: the workers are in the middle of the round.

    Returns:
        Whether the round is complete. If not, ranks were asked to stop: the workers are in the middle of it.
    """
    heartbeat, where, schedule = pool.runtime.heartbeat, f"round {plan.round + 1}", pool.schedule(plan)
    reached = reached_by_all(pool, plan, report) if is_resumed else 0  # what was averaged up to there has been
    inner_reports: InnerReports = {}
    outer_reports, measure_reports = completed, dict[int, MeasureReport]()
    for update in schedule.boundaries(plan.updates):
        is_end, started = update == plan.updates, schedule.started(update)
        heartbeat.enter(f"{where}: inner phase")
        is_first, all_come = not inner_reports, True
        if started and not is_end and update > reached:
            done, all_come = inner_to_average(pool, plan, report, stop, update, is_first, is_resumed)
        else:
            done = inner(pool, plan, stop, update, is_first, is_resumed)
        inner_reports = together(inner_reports, done)
        heartbeat.enter(f"{where}: outer step")
        for fragment in schedule.mixed(update) if has_reached(pool, plan, update) else ():
            outer_reports = together(outer_reports, mix_in(pool, fragment))
        averaged = (*started, 0) if is_end else started
        if not averaged or update <= reached:
            continue
        if not all_come or (is_end and not all_there(pool, plan, update, report)()):
            return False
        if is_end:
            measure_reports = measure(pool, plan)
        for fragment in averaged:
            outer_reports = together(outer_reports, average(pool, plan, fragment))
        if not is_end:
            begin_averages(pool)
    advance_cursors(pool, plan, report)
    if plan.evaluate:
        outer_reports = together(outer_reports, complete_all(pool))
    average_anchors(pool, plan)
    evaluations = evaluate_anchors(pool, plan.layout) if plan.evaluate else {}
    report.trainers = trainer_reports(pool, inner_reports, measure_reports, outer_reports, evaluations)
    if not is_resumed and pool.workers:
        taken = sum(worker.updates_done for worker in pool.workers)
        report.update_seconds = round(sum(done.seconds for done in inner_reports.values()) / taken, 6)
    report.capacity, report.resources, report.notes = (
        pool.capacity,
        pool.runtime.monitor.take(),
        pool.splits.train.take_notes(),
    )
    heartbeat.enter(f"{where}: report")
    return True


@record_function("record")
def record(
    pool: LocalPool, coordinator: Coordinator, last: RoundPlan | None, plan: RoundPlan, journal: Journal,
    checkpoints: Checkpoints | None, report: RankReport,
) -> None:  # fmt: skip
    """Record the round that has ended, and write a checkpoint if the plan says so.

    Args:
        last: the plan of that round; None for the state before training.
        plan: the next one, which holds the statistics smoothed over that round.
        report: the next one of this rank, of which the checkpoint's cost is a part.

    Raises:
        RanksDisagreeError: the ranks must not continue.
    """
    if coordinator.reports:  # rank 0 alone
        journal.write(round_records(pool.settings, last, plan, coordinator.reports))
    if plan.error:
        raise RanksDisagreeError(f"after round {plan.round}: {plan.error}")
    if checkpoints and last and plan.checkpoint:
        start = time.perf_counter()
        checkpoints.save(pool, plan.last_checkpoint, last, coordinator.pool_report, plan.seconds, MergeReport())
        report.checkpoint_seconds = time.perf_counter() - start


def interrupted(
    pool: LocalPool, coordinator: Coordinator, plan: RoundPlan, report: RankReport, checkpoints: Checkpoints | None
) -> Outcome:
    """End in the middle of a round's inner phase, with a checkpoint from which the round can be completed."""
    complete_all(pool)
    seconds = coordinator.seconds
    if checkpoints:
        checkpoint_id = CheckpointId(plan.last_checkpoint.number + 1, plan.round, plan.pool_tokens, seconds)
        merge = merged_reports(pool.runtime.control, report) if plan.regrouping else MergeReport()
        checkpoints.save(pool, checkpoint_id, plan, None, seconds, merge)
    return Outcome(INTERRUPTED, pool, plan)


def evaluated_candidates(pool: LocalPool, plan: RoundPlan) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate every trainer's anchor and their average, and choose what is saved; see `finish`."""
    settings, heartbeat = pool.settings, pool.runtime.heartbeat
    heartbeat.enter("evaluation at the end")
    with reported_wait(heartbeat.in_words, speaks=pool.runtime.rank == 0):
        return finish(
            pool.trainers, plan.layout, pool.flat_model, pool.objective, pool.groups, pool.runtime,
            pool.splits.validation, settings.evaluation, settings.final,
        )  # fmt: skip
