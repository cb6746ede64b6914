"""The loop (docs/architecture.md, "A round"): report, plan, record, merge, and a round of updates and outer steps."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from adloco_dist.averaging.checks import RanksDisagreeError
from adloco_dist.averaging.schedule import Action
from adloco_dist.checkpoint.state import Midway, RunState
from adloco_dist.checkpoint.writer import Checkpoints
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, CheckpointId, PlanInputs, RoundPlan
from adloco_dist.policy.report import MergeReport, RankReport
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round import steps
from adloco_dist.round.coordinate import Coordinator, merged_reports
from adloco_dist.round.evaluate import finish
from adloco_dist.run.journal import Journal
from adloco_dist.run.profiler import RoundProfiler
from adloco_dist.run.recording import round_rows
from adloco_dist.terminal import reported_wait

log = logging.getLogger(__name__)


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
    """The evaluations of all candidates, and which was chosen; the same on every rank; None: stopped early."""
    weights: torch.Tensor | None = None
    """The flat weights that were chosen, on rank 0, or on the first ranks that hold a worker together."""


def train(
    pool: LocalPool,
    inputs: PlanInputs,
    journal: Journal,
    stop: StopRequest,
    checkpoints: Checkpoints | None = None,
    resumed: RunState | None = None,
    profiler: RoundProfiler | None = None,
) -> Outcome:
    """Train the pool until its budget is spent or a rank was asked to stop.

    Collective: every rank calls it with equal settings, data and module.

    Args:
        checkpoints: saves the run when a plan says so, or when the run is stopped; None: nothing is saved.
        resumed: the state from which the run resumes, whose tensors `pool` holds; None: it begins.
        profiler: profiles chosen rounds; None: profiles none.

    Raises:
        RanksDisagreeError: on every rank, when ranks hold different anchors of a trainer or acted on different plans.
    """
    profiler = profiler or RoundProfiler(range(0), Path(), pool.runtime)
    last, plan, seconds, saved, midway = None, None, 0.0, None, None
    if resumed:
        plan, seconds, saved, midway = resumed.plan, resumed.seconds, resumed.pool, resumed.midway
    coordinator = Coordinator(pool.settings, inputs, seconds, saved)
    report = steps.opening_report(pool, inputs.layout, is_new=resumed is None)
    while True:
        if midway is None:
            report.stop_requested = stop.requested
            last, (plan, report) = plan, coordinator.plan_next(pool.runtime.control, report, plan)
            steps.begin_averages(pool)
            if plan.needs_newest_anchors:
                steps.complete_all(pool, report)
            record(pool, coordinator, last, plan, journal, checkpoints, report)
            if plan.stop:
                break
        assert plan
        where = f"round {plan.round + 1}"
        profiler.enter(plan.round + 1)
        with about(where), record_function(where):
            if midway:
                report = steps.resume_round(pool, plan, midway.merge)
            else:
                steps.begin_round(pool, last, plan, report)
            interrupted_at = run_round(pool, plan, report, stop, midway.next_event if midway else 0)
        if interrupted_at is not None:
            profiler.end()
            return interrupted(pool, coordinator, plan, report, interrupted_at, checkpoints)
        midway = None
        report.is_writing = checkpoints is not None and checkpoints.is_writing
        log.info("%s: %s", where, report.in_words())
    profiler.end()
    if plan.stop in (INTERRUPTED, NONFINITE):
        return Outcome(plan.stop, pool, plan)
    heartbeat = pool.runtime.heartbeat
    heartbeat.enter("evaluation at the end")
    with reported_wait(heartbeat.in_words, speaks=pool.runtime.rank == 0):
        return Outcome(plan.stop, pool, plan, *finish(pool, plan.layout))


def run_round(
    pool: LocalPool, plan: RoundPlan, report: RankReport, stop: StopRequest, first_event: int = 0
) -> int | None:
    """Take the updates and the outer steps of one round, and note in the report what came of them.

    Args:
        first_event: the event of the plan with which the round begins; averages before it have been taken or travel.

    Returns:
        None; or, if ranks were asked to stop in the middle of the round, the event with which it is to go on.
    """
    heartbeat, where = pool.runtime.heartbeat, f"round {plan.round + 1}"
    updates_before = sum(worker.updates_done for worker in pool.workers)
    next_event = first_event
    for number, event in enumerate(plan.events[first_event:], first_event):
        is_reached = steps.inner(pool, plan, event, report, stop)
        if event.action is Action.mix:
            if is_reached:
                steps.mix_in(pool, event, report)
            continue
        if not is_reached:
            return next_event
        if event.action is Action.end:
            steps.measure(pool, plan, report)
        steps.average(pool, plan, event, report)
        next_event = number + 1
    steps.advance_cursors(pool, plan, report)
    if plan.evaluate:
        steps.complete_all(pool, report)
    steps.average_anchors(pool, plan)
    steps.report_round(pool, plan, report, updates_before)
    heartbeat.enter(f"{where}: report")
    return None


@record_function("record")
def record(
    pool: LocalPool,
    coordinator: Coordinator,
    last: RoundPlan | None,
    plan: RoundPlan,
    journal: Journal,
    checkpoints: Checkpoints | None,
    report: RankReport,
) -> None:
    """Record the round that has ended, and write a checkpoint if the plan says so.

    Args:
        last: the plan of that round; None for the state before training.
        plan: the next one, which holds the statistics smoothed over that round.
        report: the next one of this rank, of which the checkpoint's cost is a part.

    Raises:
        RanksDisagreeError: the ranks must not continue.
    """
    if coordinator.reports:  # rank 0 alone
        journal.write(round_rows(pool.settings, last, plan, coordinator.reports))
    if plan.error:
        raise RanksDisagreeError(f"after round {plan.round}: {plan.error}")
    if checkpoints and last and plan.checkpoint:
        start = time.perf_counter()
        checkpoints.save(pool, plan.last_checkpoint, last, coordinator.pool_report, plan.seconds)
        report.checkpoint_seconds = time.perf_counter() - start


def interrupted(
    pool: LocalPool,
    coordinator: Coordinator,
    plan: RoundPlan,
    report: RankReport,
    next_event: int,
    checkpoints: Checkpoints | None,
) -> Outcome:
    """End in the middle of a round, with a checkpoint from which the round can be completed."""
    steps.complete_all(pool, report)
    if checkpoints:
        seconds = coordinator.seconds
        checkpoint_id = CheckpointId(plan.last_checkpoint.number + 1, plan.round, plan.pool_tokens, seconds)
        merge = merged_reports(pool.runtime.control, report) if plan.merge else MergeReport()
        checkpoints.save(pool, checkpoint_id, plan, Midway(next_event, merge), seconds)
    return Outcome(INTERRUPTED, pool, plan)
