"""The round loop (design, section 3): report, plan, regroup, inner, outer, evaluate, until a plan says stop."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adloco_dist.checkpointing import Checkpoints
from adloco_dist.cluster.failures import about
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Algorithm
from adloco_dist.decisions.checkpointing import Mark
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.plan import INTERRUPTED, SPOILT, PoolReport, Premises, RoundPlan
from adloco_dist.decisions.planning import plan_round
from adloco_dist.decisions.records import round_records
from adloco_dist.decisions.report import RankReport, TrainerReport, pool_report
from adloco_dist.decisions.state import RunState
from adloco_dist.hosting import Rank, regroup, stream_notes, stream_places
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.coordinate import all_complete, coordinate
from adloco_dist.round.evaluate import evaluate, part_of
from adloco_dist.round.finish import finish
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.outer import adopt, outer, ring_bytes_sent
from adloco_dist.round.phases import timed
from adloco_dist.run.journal import Journal
from adloco_dist.terminal import told_wait

log = logging.getLogger(__name__)


class RanksDisagreeError(RuntimeError):
    """Ranks hold different anchors of one trainer, or act on different plans: the run must not go on."""


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind."""

    stop: str
    """Why it ended."""
    rank: Rank
    """What this rank holds."""
    plan: RoundPlan
    """The last one."""
    result: dict[str, Any] | None = None
    """The evaluation of all candidates and which one was chosen, the same on every rank; None: stopped early."""
    weights: torch.Tensor | None = None
    """The flat weights that were chosen, on rank 0."""


def train(
    rank: Rank, premises: Premises, journal: Journal, stop: StopRequest, checkpoints: Checkpoints | None = None,
    resumed: RunState | None = None,
) -> Outcome:  # fmt: skip
    """Train the pool until its budget is spent or a rank was asked to stop.

    Collective: every rank calls it with equal settings, corpus and module.

    Args:
        checkpoints: takes the state of the run when a plan says so, or it is stopped; None: nothing is kept.
        resumed: where the run goes on, of which `rank` holds the tensors; None: it begins.

    Raises:
        RanksDisagreeError: on every rank, when ranks hold different anchors of a trainer or act on different plans.
    """
    settings, runtime = rank.settings, rank.runtime
    start = time.monotonic() - (resumed.seconds if resumed else 0.0)
    plan = resumed.plan if resumed else None
    known = resumed.pool if resumed else None
    is_midway = resumed is not None and known is None
    pool, last_plan = PoolReport(), None
    report = opening_report(rank, premises.layout, is_new=resumed is None)
    report.stop_requested = stop.requested

    def decide(reports: Sequence[RankReport]) -> RoundPlan:
        nonlocal pool
        pool = pool_report(reports, plan, time.monotonic() - start)
        if known:  # the last round's, but for what a new start changes
            now = {name: getattr(pool, name) for name in ("errors", "stop_requested", "capacities", "spoilt")}
            pool = replace(known, **now)
        return plan_round(settings, premises, plan, pool)

    while True:
        if not is_midway:
            last_plan = plan
            plan, reports, report = coordinate(runtime.control, report, decide)
            if reports and not known:  # rank 0 alone
                journal.write(round_records(settings, last_plan, plan, reports))
            known = None
            if plan.error:
                raise RanksDisagreeError(f"after round {plan.round}: {plan.error}")
            if checkpoints and last_plan and plan.checkpoint:
                checkpoints.save(rank, plan.last_checkpoint, last_plan, pool, plan.seconds)
            if plan.stop:
                break
        assert plan
        with about(f"round {plan.round + 1}"):
            if not is_midway and last_plan and plan.regrouping:
                regroup(rank, last_plan.layout, plan, report)
            if not run_round(rank, plan, report, stop, is_midway):
                seconds = time.monotonic() - start
                mark = Mark(plan.last_checkpoint.number + 1, plan.round, plan.pool_tokens, seconds)
                if checkpoints:
                    checkpoints.save(rank, mark, plan, None, seconds)
                return Outcome(INTERRUPTED, rank, plan)
        is_midway = False
        report.stop_requested = stop.requested
        report.is_writing = checkpoints is not None and checkpoints.is_writing
        log.info("round %d: %s", plan.round + 1, report.in_words())
    if plan.stop in (INTERRUPTED, SPOILT):
        return Outcome(plan.stop, rank, plan)
    runtime.heartbeat.enter("evaluation at the end")
    with told_wait(runtime.heartbeat.in_words, speaks=runtime.rank == 0):
        result, weights = finish(
            rank.trainers, plan.layout, rank.flat_model, rank.groups, runtime.control, rank.splits.validation,
            settings.evaluation, settings.final, settings.data.is_labelled,
        )  # fmt: skip
    return Outcome(plan.stop, rank, plan, result, weights)


def run_round(rank: Rank, plan: RoundPlan, report: RankReport, stop: StopRequest, is_midway: bool = False) -> bool:
    """One round of every trainer, trainers in ascending order: the order of all their collectives.

    Args:
        is_midway: the workers are in the middle of its inner phase already.

    Returns:
        Whether it is complete. If not, ranks were asked to stop: their workers are in the middle of the inner phase.
    """
    settings, layout, device = rank.settings, plan.layout, rank.runtime.device
    is_ddp = settings.algorithm.name is Algorithm.ddp
    shares = {id: TrainerReport(num_workers=len(trainer.workers)) for id, trainer in rank.trainers.items()}
    if rank.estimators:
        for lane in rank.lanes:
            lane.sketch.renew(settings.seed, plan.round)
    heartbeat, place = rank.runtime.heartbeat, f"round {plan.round + 1}"
    heartbeat.enter(f"{place}: inner phase")
    phase = InnerPhase(plan, settings, rank.splits.train, rank.estimators, stop, is_midway)
    for id, done in phase.run(list(rank.trainers.values()), rank.lanes, rank.residence).items():
        shares[id].seconds["inner"], shares[id].train_loss_sum = done.seconds, done.loss_sum
        shares[id].data_seconds, shares[id].num_targets = done.data_seconds, done.num_targets
        shares[id].pass_seconds_per_sequence, shares[id].notes = done.pass_seconds_per_sequence, done.notes
    if shares:
        next(iter(shares.values())).notes += stream_notes(rank)  # of the rank, told with one of its trainers
    heartbeat.enter(f"{place}: outer step")
    is_complete = all(worker.updates_done == plan.updates for worker in rank.workers)
    places = stream_places(rank, plan) if is_complete else {}
    is_complete, places = all_complete(rank.runtime.control, report, is_complete, places)
    if not is_complete:
        return False
    for id, shard in rank.shards.items():
        shard.advance(plan.updates, layout.num_workers(id), plan.batches[id].local_batch, places)
    for id in layout.trainers:
        group = rank.groups.of(layout.ranks(id))  # on all ranks, for it may have to be formed
        if id not in rank.trainers:
            continue
        trainer, share = rank.trainers[id], shares[id]
        with about(f"trainer {id}"):
            if estimator := rank.estimators.get(id):
                with timed(share.seconds, "measure", device):
                    measured = estimator.measure(trainer, layout, group)
                share.statistics, share.bytes_sent["statistics"] = measured.statistics, measured.bytes_sent
            with timed(share.seconds, "outer", device):
                step = adopt(trainer, group) if is_ddp else outer(trainer, group)
        share.num_finite, share.spoilt = step.num_finite, step.spoilt
        share.pseudo_gradient_norm = step.pseudo_gradient_norm
        share.bytes_sent["outer"] = step.bytes_sent
        if is_ddp:
            gradient = rank.flat_model.gradient[: rank.flat_model.buffer_boundary]
            share.bytes_sent["gradients"] = plan.updates * ring_bytes_sent(gradient, group)
    for id, trainer in rank.trainers.items():
        share = shares[id]
        share.checksum, share.is_finite, share.cursor = trainer.checksum(), trainer.is_finite, trainer.shard.cursor
        if plan.evaluate:
            with timed(share.seconds, "evaluate", device):
                assess(rank, trainer, layout, share)
    report.trainers, report.capacity, report.plan_digest = shares, rank.capacity, plan.digest()
    report.resources = rank.runtime.monitor.take()
    heartbeat.enter(f"{place}: report")
    return True


def assess(rank: Rank, trainer: Trainer, layout: Layout, share: TrainerReport) -> None:
    """Evaluate the trainer's anchor on this rank's part of the validation sequences."""
    limits, part = rank.settings.evaluation, part_of(rank.runtime.rank, trainer.id, layout)
    share.validation = evaluate(
        rank.flat_model, trainer.anchor, rank.splits.validation, limits.sequences, limits.batch, part
    )


def opening_report(rank: Rank, layout: Layout, is_new: bool) -> RankReport:
    """Before the first round of a start: all ranks must hold the same anchors.

    Args:
        is_new: the run begins, and the anchors' loss is where its curves start.
    """
    report = RankReport(rank.runtime.rank, capacity=rank.capacity)
    for id, trainer in rank.trainers.items():
        share = TrainerReport(num_workers=len(trainer.workers), checksum=trainer.checksum())
        if is_new and rank.settings.evaluation.every_rounds is not None:
            with timed(share.seconds, "evaluate", rank.runtime.device):
                assess(rank, trainer, layout, share)
        report.trainers[id] = share
    return report
