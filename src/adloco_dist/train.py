"""The loop (docs/architecture.md, "A round"): report, plan, record, merge, and a round of updates and outer steps."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from adloco_dist.averaging.checks import RanksDisagreeError
from adloco_dist.averaging.schedule import Action
from adloco_dist.checkpoint.state import RunState
from adloco_dist.checkpoint.writer import Checkpoints
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, CheckpointId, PlanInputs, RoundPlan
from adloco_dist.policy.report import MergeReport, RankReport
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.worker import peak_lr
from adloco_dist.round import steps
from adloco_dist.round.coordinate import Coordinator, Decision, merged_reports
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
    runtime, plan, first_event = pool.runtime, None, 0
    found, seconds = None, 0.0
    profiler = profiler or RoundProfiler(range(0), Path(), runtime)
    if resumed:
        plan, first_event = replace(resumed.plan, stop=None), resumed.next_event
        found, seconds = resumed.pool, resumed.seconds

    worker_lr = peak_lr(pool.settings.inner, pool.flat_model.hidden_matrices)

    def record(decision: Decision) -> None:
        journal.take_plan(decision.plan)
        if decision.reports and decision.found:
            rows = (decision.reported, decision.plan, decision.reports, decision.found.seconds)
            journal.write(round_rows(pool.settings, *rows, worker_lr))

    known = (plan, found, seconds)
    with Coordinator(pool.settings, inputs, runtime, record, *known) as coordinator, noted(pool, coordinator):
        if plan and resumed:
            journal.take_plan(plan)  # which does not stop any more, if it did
            report = steps.resume_round(pool, plan, resumed.merge)
        else:
            coordinator.hand_in(steps.opening_report(pool, inputs.layout))
            plan, report = next_round(pool, coordinator, None, checkpoints)
        while not plan.stop:
            where = f"round {plan.round + 1}"
            profiler.enter(plan.round + 1)
            with about(where), record_function(where):
                interrupted_at = run_round(pool, plan, report, stop, first_event)
            if interrupted_at is not None:
                profiler.end()
                at = None if stop.ends_with_round else interrupted_at  # else no update of this round was taken
                return interrupted(pool, coordinator, plan, report, at, checkpoints)
            first_event = 0
            report.is_writing = checkpoints is not None and checkpoints.is_writing
            coordinator.hand_in(report)
            log.info("%s: %s", where, report.in_words())
            plan, report = next_round(pool, coordinator, plan, checkpoints)
    profiler.end()
    if plan.stop == NONFINITE:
        return Outcome(plan.stop, pool, plan)
    heartbeat = runtime.heartbeat
    heartbeat.enter("evaluation at the end")
    with reported_wait(heartbeat.in_words, speaks=runtime.rank == 0):
        return Outcome(plan.stop, pool, plan, *finish(pool, plan.layout))


@contextmanager
def noted(pool: LocalPool, coordinator: Coordinator) -> Iterator[None]:
    """Note what is known when the block ends, perhaps by an error: those who are left may go on from there."""
    try:
        yield
    finally:
        if pool.standing:
            pool.standing.found, pool.standing.seconds = coordinator.newest(), coordinator.seconds


def next_round(
    pool: LocalPool,
    coordinator: Coordinator,
    last: RoundPlan | None,
    checkpoints: Checkpoints | None,
) -> tuple[RoundPlan, RankReport]:
    """Take the plan after `last`, merge trainers and write a checkpoint if it says so; the plan, and this rank's report
    of the round.

    Anchors that are merged, saved or the last are the same on all ranks, and what is saved is finite.
    """
    plan, report = coordinator.next_plan()
    refuse_error(plan)
    is_finite = True
    with about(f"round {plan.round + 1}"):
        if plan.needs_newest_anchors:
            is_finite = bring_together(pool, report, f"after round {plan.round}")
            following = coordinator.following(report)
            refuse_error(following)
            if plan.stop:
                plan = ended(plan, following)
        steps.begin_round(pool, last, plan, report)
        if checkpoints and plan.checkpoint and is_finite:
            start = time.perf_counter()
            keep(pool, coordinator, plan, plan.last_checkpoint, report, checkpoints)
            report.checkpoint_seconds = time.perf_counter() - start
    return plan, report


def bring_together(pool: LocalPool, report: RankReport, when: str) -> bool:
    """Bring the anchors up to date, make sure that ranks hold the same, and let them know where streams stand; whether
    the anchors are finite. Collective."""
    steps.complete_all(pool, report)
    steps.share_positions(pool, report)
    return steps.compare_anchors(pool, report, when)


def ended(plan: RoundPlan, following: RoundPlan) -> RoundPlan:
    """The plan that ends the run, by what the reports of the last round say, which only the following one knows."""
    stop = following.stop or plan.stop
    return replace(
        plan,
        stop=stop,
        checkpoint=stop == NONFINITE and (plan.checkpoint or following.checkpoint),
        nonfinite_rounds=following.nonfinite_rounds,
        outer_steps=following.outer_steps,
    )


def run_round(
    pool: LocalPool, plan: RoundPlan, report: RankReport, stop: StopRequest, first_event: int = 0
) -> int | None:
    """Take the updates and the outer steps of one round, and note in the report what came of them.

    Args:
        first_event: the event of the plan with which the round begins, as in `Standing`; averages before it have been
            taken or travel.

    Returns:
        None; or, if ranks were asked to stop in the middle of the round, the event with which it is to go on.
    """
    updates_before = sum(worker.updates_done for worker in pool.workers)
    next_event = first_event
    standing = pool.stand(plan, next_event, report.merge)
    stop.enter(plan.round)
    for number, event in enumerate(plan.events[first_event:], first_event):
        is_reached = steps.inner(pool, plan, number, report, stop)
        if event.action is Action.mix:
            if is_reached:
                steps.mix_in(pool, event, report)
            continue
        if not is_reached:
            return next_event
        if event.action is Action.end and plan.measures:
            steps.measure(pool, report)
        steps.average(pool, plan, event, report)
        standing.next_event = next_event = number + 1
    if first_event <= len(plan.events):
        steps.advance_cursors(pool, plan, report)
        if plan.evaluate:
            steps.complete_all(pool, report)
        steps.average_anchors(pool, plan, report)
        standing.next_event = len(plan.events) + 1
    steps.report_round(pool, plan, report, updates_before)
    pool.runtime.heartbeat.enter(f"round {plan.round + 1}: report")
    return None


def refuse_error(plan: RoundPlan) -> None:
    """Raise a RanksDisagreeError if the ranks must not continue, as their reports of a round before have shown."""
    if plan.error:
        raise RanksDisagreeError(f"after round {max(plan.round - 1, 0)}: {plan.error}")


def interrupted(
    pool: LocalPool,
    coordinator: Coordinator,
    plan: RoundPlan,
    report: RankReport,
    next_event: int | None,
    checkpoints: Checkpoints | None,
) -> Outcome:
    """End in the middle of a round, or before its first update (None), with a checkpoint from which the round can be
    completed."""
    is_finite = bring_together(pool, report, f"in round {plan.round + 1}")
    refuse_error(coordinator.following(report))
    if checkpoints and is_finite:
        number = plan.last_checkpoint.number + 1
        checkpoint_id = CheckpointId(number, plan.round, plan.pool_tokens, coordinator.seconds)
        keep(pool, coordinator, plan, checkpoint_id, report, checkpoints, next_event)
    return Outcome(INTERRUPTED, pool, plan)


def keep(
    pool: LocalPool,
    coordinator: Coordinator,
    plan: RoundPlan,
    checkpoint_id: CheckpointId,
    report: RankReport,
    checkpoints: Checkpoints,
    interrupted_at: int | None = None,
) -> None:
    """Write a checkpoint of a round that has begun."""
    merge = merged_reports(pool.runtime.control, report) if plan.merge else MergeReport()
    checkpoints.save(pool, checkpoint_id, plan, merge, coordinator.found, coordinator.seconds, interrupted_at)
