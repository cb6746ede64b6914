"""The round loop (design, section 3): report and plan, then inner, outer and evaluate, until a plan says stop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Algorithm
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.plan import Premises, RoundPlan, plan_round
from adloco_dist.decisions.report import RankReport, TrainerReport, pool_report, round_records
from adloco_dist.hosting import Rank
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.coordinate import coordinate
from adloco_dist.round.evaluate import evaluate, part_of
from adloco_dist.round.finish import finish
from adloco_dist.round.inner import inner
from adloco_dist.round.outer import adopt, outer, ring_bytes_sent
from adloco_dist.round.phases import timed
from adloco_dist.run.journal import Journal


class AnchorsDifferError(RuntimeError):
    """Ranks of one trainer hold different anchors: the run must not go on."""


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind."""

    stop: str
    """Why it ended."""
    result: dict[str, Any]
    """The evaluation of all candidates and which one was chosen; the same on every rank."""
    weights: torch.Tensor | None
    """The flat weights that were chosen, on rank 0."""
    flat_model: FlatModel
    trainers: Sequence[Trainer]
    """This rank's shares."""


def train(rank: Rank, premises: Premises, journal: Journal, stop: StopRequest) -> Outcome:
    """Train the pool until its budget is spent or a rank was asked to stop.

    Collective: every rank calls it with equal settings, corpus and module.

    Raises:
        AnchorsDifferError: on every rank, when the ranks of a trainer disagree about its anchor.
    """
    settings, runtime = rank.settings, rank.runtime
    plan: RoundPlan | None = None
    report = opening_report(rank, premises.layout)
    start = time.monotonic()

    def decide(reports: Sequence[RankReport]) -> RoundPlan:
        return plan_round(settings, premises, plan, pool_report(reports, plan, time.monotonic() - start))

    while True:
        last_plan = plan
        plan, reports, report = coordinate(runtime.control, report, decide)
        if reports:  # rank 0 alone
            journal.write(round_records(settings, last_plan, plan, reports))
        if plan.error:
            raise AnchorsDifferError(f"after round {plan.round}: {plan.error}")
        if plan.stop:
            break
        run_round(rank, plan, report)
        report.stop_requested = stop.requested

    everyone = tuple(range(runtime.world_size))
    world = Groups(runtime.backend, settings.cluster.merge_seconds)
    world.form([everyone])
    result, weights = finish(
        rank.trainers, plan.layout, rank.flat_model, world.of(everyone), runtime.control, rank.splits.validation,
        settings.evaluation,
    )  # fmt: skip
    return Outcome(plan.stop, result, weights, rank.flat_model, rank.trainers)


def run_round(rank: Rank, plan: RoundPlan, report: RankReport) -> None:
    """One round of every trainer on this rank, trainers in ascending order: the order of all their collectives."""
    settings, layout, device = rank.settings, plan.layout, rank.runtime.device
    is_ddp = settings.algorithm.name is Algorithm.ddp
    shares = {trainer.id: TrainerReport(num_workers=len(trainer.workers)) for trainer in rank.trainers}
    if rank.estimators:
        rank.sketch.renew(settings.seed, plan.round)
    for trainer in rank.trainers:
        share, estimator = shares[trainer.id], rank.estimators.get(trainer.id)
        with timed(share.seconds, "inner", device):
            done = inner(trainer, rank.module, rank.splits.train, plan, settings, estimator)
        share.train_loss_sum, share.pass_seconds_per_sequence = done.loss_sum, done.pass_seconds_per_sequence
        share.notes = done.notes
        if is_ddp:
            group = rank.groups.of(layout.ranks(trainer.id))
            share.bytes_sent["gradients"] = plan.updates * ring_bytes_sent(rank.flat_model.gradient, group)
    for trainer in rank.trainers:
        share, group = shares[trainer.id], rank.groups.of(layout.ranks(trainer.id))
        if estimator := rank.estimators.get(trainer.id):
            with timed(share.seconds, "measure", device):
                measured = estimator.measure(trainer, layout, group)
            share.statistics, share.bytes_sent["statistics"] = measured.statistics, measured.bytes_sent
        with timed(share.seconds, "outer", device):
            step = adopt(trainer) if is_ddp else outer(trainer, group)
        share.num_finite, share.pseudo_gradient_norm = step.num_finite, step.pseudo_gradient_norm
        share.bytes_sent["outer"] = step.bytes_sent
    for trainer in rank.trainers:
        share = shares[trainer.id]
        share.checksum, share.cursor = trainer.checksum(), trainer.shard.cursor
        if plan.evaluate:
            with timed(share.seconds, "evaluate", device):
                assess(rank, trainer, layout, share)
    report.trainers, report.capacity = shares, rank.flat_model.capacity


def assess(rank: Rank, trainer: Trainer, layout: Layout, share: TrainerReport) -> None:
    """Evaluate the trainer's anchor on this rank's part of the validation sequences."""
    limits, part = rank.settings.evaluation, part_of(rank.runtime.rank, trainer.id, layout)
    share.validation_loss_sum, share.validation_tokens = evaluate(
        rank.flat_model, trainer.anchor, rank.splits.validation, limits.sequences, limits.batch, part
    )


def opening_report(rank: Rank, layout: Layout) -> RankReport:
    """The state before training: all ranks must hold the same anchors, whose loss is where the curves start."""
    report = RankReport(rank.runtime.rank)
    for trainer in rank.trainers:
        share = TrainerReport(num_workers=len(trainer.workers), checksum=trainer.checksum())
        if rank.settings.evaluation.every_rounds is not None:
            with timed(share.seconds, "evaluate", rank.runtime.device):
                assess(rank, trainer, layout, share)
        report.trainers[trainer.id] = share
    return report
