"""Merges before a round: averaged anchors, united shards, workers of new trainers, groups."""

import time
from collections.abc import Collection

import torch
from torch.profiler import record_function

from adloco_dist.config import Settings, Shards, WireFormat
from adloco_dist.data.protocols import Cursor
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.regrouping import Regrouping, transfers
from adloco_dist.policy.report import MergeReport
from adloco_dist.pool.averager import new_averager
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.round.local_pool import LocalPool, probe_in_turn, set_up_estimators
from adloco_dist.round.merge import merge
from adloco_dist.round.outer import join, leave
from adloco_dist.round.steps import evaluate_anchors


@record_function("merge")
def regroup(pool: LocalPool, before: Layout, plan: RoundPlan) -> MergeReport:
    """Do what the plan says about merges: averaged anchors, united shards, workers of new trainers, groups.

    Collective over the whole world.

    Args:
        before: the layout of the last round.
    """
    assert plan.regrouping
    members = _losses(pool, before, {member for merge in plan.regrouping.merges for member in merge.shares})
    start = time.perf_counter()
    _unite_cursors(pool.cursors, plan.regrouping, pool.settings)
    bytes_sent = _bring_together(pool, before, plan, plan.regrouping)
    for slot in pool.slots:  # at no instance until the next turn, lest one that has ended is kept alive
        slot.flat_model.point_at(slot.flat_model.gradient)
    pool.groups.form_all(plan.layout.rank_sets)
    set_up_estimators(pool)
    if pool.runtime.seat in plan.probed:
        del pool.slots[max(1, len(pool.workers)) :]
        pool.offload.settle(pool.workers)
    if plan.probed:
        probe_in_turn(pool, plan.layout, takes_part=pool.runtime.seat in plan.probed)
    seconds = round(time.perf_counter() - start, 6)
    merged = _losses(pool, plan.layout, {merge.survivor for merge in plan.regrouping.merges})
    return MergeReport(seconds, bytes_sent, members, merged)


def _losses(pool: LocalPool, layout: Layout, trainers: Collection[int]) -> dict[int, Evaluation]:
    """This rank's parts of the evaluations of some anchors; none where no curves are drawn."""
    if not pool.settings.evaluation.draws_curves:
        return {}
    reports = evaluate_anchors(pool, layout, trainers)
    return {trainer: report.sums for trainer, report in reports.items() if report.sums}


def _bring_together(pool: LocalPool, before: Layout, plan: RoundPlan, regrouping: Regrouping) -> dict[int, int]:
    """Make this rank's trainers and workers those after the merges; return the bytes sent for it, by trainer."""
    old, me, shards = pool.trainers, pool.runtime.seat, pool.flat_model.shards
    workers = {(trainer.id, worker.id): worker for trainer in old.values() for worker in trainer.workers}
    broken = {trainer_id for trainer_id, trainer in old.items() if not shards.all_agree(trainer.is_finite)}
    pool.trainers = {
        trainer_id: old.get(trainer_id)
        or Trainer(
            trainer_id,
            [],
            pool.flat_model.gradient,
            pool.flat_model,
            pool.cursors[trainer_id],
            pool.settings,
            new_averager(pool.settings.wire, pool.flat_model.dtype, pool.runtime.nodes),
        )
        for trainer_id in plan.layout.trainers_on(me)
    }
    # What a worker has learned since it last met the others: nothing, unless fragments meet at different times.
    for origin in (origin for origins in regrouping.origins.values() for origin in origins if origin in workers):
        if origin[0] in broken:
            _begin_anew(workers[origin])
        else:
            leave(old[origin[0]], workers[origin])
    owed = {trainer.workers[0]: trainer.residual for trainer in old.values()}
    steps = transfers(before, plan.layout, regrouping)
    is_compressed = pool.settings.wire.format is not WireFormat.fp32
    bytes_sent = merge(
        old, pool.trainers, steps, pool.groups, pool.flat_model, me, is_compressed, pool.settings.merge.radial
    )
    for trainer_id, trainer in pool.trainers.items():
        trainer.cursor = pool.cursors[trainer_id]
        if trainer_id not in regrouping.origins:
            continue
        trainer.workers = []
        for number in plan.layout.workers_on(me, trainer_id):
            origin = regrouping.origins[trainer_id][number]
            worker = workers[origin]
            worker.id = number
            join(trainer, worker)
            trainer.workers.append(worker)
        if trainer.residual is not None:
            trainer.residual = torch.zeros_like(trainer.residual)
            for worker in trainer.workers:
                if (residual := owed.get(worker)) is not None:
                    trainer.residual += residual
    return bytes_sent


def _begin_anew(worker: Worker) -> None:
    """Leave an anchor that is not finite: the worker's moments are no better."""
    worker.weights.zero_()
    worker.departed.zero_()
    worker.reset_optimizer()


def _unite_cursors(cursors: dict[int, Cursor], regrouping: Regrouping, settings: Settings) -> None:
    for one in regrouping.merges:
        if settings.data.shards is Shards.disjoint:
            others = [cursors[member] for member in sorted(one.shares) if member != one.survivor]
            cursors[one.survivor] = cursors[one.survivor].unite(others)
        for ended in one.ended:
            del cursors[ended]
