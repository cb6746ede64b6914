"""A merge before a round: averaged anchors, united shards, workers of another trainer, the group of their ranks."""

import time
from collections.abc import Collection, Mapping

import torch
from torch.profiler import record_function

from adloco_dist.config import Shards, WireFormat
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import MergeReport
from adloco_dist.pool.local_pool import LocalPool, probe_in_turn
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.combine import Transfer, combine
from adloco_dist.round.evaluate import evaluate_anchors


@record_function("merge")
def regroup(pool: LocalPool, before: Layout, plan: RoundPlan) -> MergeReport:
    """Merge trainers of the last round's layout, `before`, into one, as the plan says. Collective over all ranks."""
    merge = plan.merge
    assert merge
    members = _losses(pool, before, merge.shares)
    start = time.perf_counter()
    if pool.settings.data.shards is Shards.disjoint:
        others = [pool.cursors[member] for member in merge.ended]
        pool.cursors[merge.survivor] = pool.cursors[merge.survivor].unite(others)
    for ended in merge.ended:
        del pool.cursors[ended]
    bytes_sent = _bring_together(pool, before, plan.layout, merge)
    pool.groups.form_all(plan.layout.rank_sets)
    if plan.probed:
        probe_in_turn(pool, plan.layout, takes_part=pool.runtime.seat in plan.probed)
    seconds = round(time.perf_counter() - start, 6)
    merged = _losses(pool, plan.layout, [merge.survivor])
    return MergeReport(seconds, bytes_sent, members, merged.get(merge.survivor))


def _losses(pool: LocalPool, layout: Layout, trainers: Collection[int]) -> dict[int, Evaluation]:
    """This rank's parts of the evaluations of some anchors; none unless curves are drawn."""
    if pool.settings.evaluation.every is None:
        return {}
    reports = evaluate_anchors(pool, layout, trainers)
    return {trainer: report.sums for trainer, report in reports.items() if report.sums}


def _bring_together(pool: LocalPool, before: Layout, after: Layout, merge: Merge) -> int:
    """Merge the members on this rank, and their workers, into the survivor; return the bytes that this rank sent."""
    seat, flat_model = pool.runtime.seat, pool.flat_model
    members = {member: pool.trainers[member] for member in merge.shares if member in pool.trainers}
    workers = {(member, worker.id): worker for member, trainer in members.items() for worker in trainer.workers}
    for trainer in members.values():
        is_finite = flat_model.shards.all_agree(trainer.is_finite)
        for worker in trainer.workers:
            # What it has learned since it last met the others: nothing, unless fragments meet at different times.
            if is_finite:
                worker.shift(trainer.anchor, trainer.awaited_by(worker), -1)
            else:  # the worker's moments are no better than the anchor
                worker.weights.zero_()
                worker.departed.zero_()
                worker.reset_optimizer()
    transfer = Transfer.of(merge.shares, before, after.ranks(merge.survivor))
    if not members:
        pool.groups.of(transfer.ranks)  # all ranks form it together
        return 0
    survivor = members.get(merge.survivor) or Trainer(
        merge.survivor,
        [],
        flat_model.gradient,
        flat_model,
        pool.cursors[merge.survivor],
        pool.settings,
        pool.runtime.nodes,
    )
    others = {trainer_id: trainer for trainer_id, trainer in pool.trainers.items() if trainer_id not in merge.shares}
    pool.trainers = dict(sorted({**others, merge.survivor: survivor}.items()))
    bytes_sent = average_members(pool, merge, transfer, members)
    survivor.cursor = pool.cursors[merge.survivor]
    if survivor.residual is not None:
        owed = torch.zeros_like(survivor.residual)
        for member in (merge.survivor, *merge.ended):
            if merge.shares[member] and member in members and (residual := members[member].residual) is not None:
                owed += residual
        survivor.residual = owed
    survivor.workers = []
    origins = merge.origins(before)
    for number in after.workers_on(seat, merge.survivor):
        worker = workers[origins[number]]
        worker.id = number
        worker.shift(survivor.anchor, survivor.awaited_by(worker), 1)
        survivor.workers.append(worker)
    return bytes_sent


def average_members(pool: LocalPool, merge: Merge, transfer: Transfer, members: Mapping[int, Trainer]) -> int:
    """Give the survivor its anchor and outer momentum (AdLoCo, DO_MERGE); return the bytes that this rank sent.

    The average of anchors begins anew there: on a slow link another vector takes longer than it takes to be as good
    again (docs/evidence.md). Where averages are compressed, members travel in bf16; but buffers may hold whole numbers,
    so a model that has some travels as it is.

    Collective over the survivor's ranks. `members` are those with a worker on this rank, as they were.
    """
    survivor, flat_model, seat = pool.trainers[merge.survivor], pool.flat_model, pool.runtime.seat
    group = pool.groups.of(transfer.ranks)
    has_buffers = flat_model.buffer_boundary < flat_model.num_elements
    in_bf16 = pool.settings.wire.format is not WireFormat.fp32 and len(transfer.shares) > 1 and not has_buffers
    bytes_sent = 0
    for place, result in enumerate(survivor.outer_vectors):
        vectors = {member: trainer.outer_vectors[place] for member, trainer in members.items()}
        # NCCL sends nothing that lives in CPU memory.
        total = result if result.device == flat_model.device else flat_model.gradient
        bytes_sent += combine(vectors, transfer, total, group, seat, in_bf16)
        if result is not total:
            result.copy_(total)
    if survivor.mean_anchor is not None:
        survivor.mean_anchor.copy_(survivor.anchor)
    return bytes_sent
