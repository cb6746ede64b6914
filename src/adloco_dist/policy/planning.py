"""How rank 0 decides a round's plan from the last one and what was reported (docs/architecture.md, "A round")."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from adloco_dist.averaging.schedule import round_events
from adloco_dist.config import BatchRequest, RoundLength, Settings, Shards
from adloco_dist.noise.statistics import Smoothed
from adloco_dist.policy.batch import BatchInputs, BatchPlan, BatchReport, BatchTarget, next_target, take
from adloco_dist.policy.budget import (
    begin_seconds,
    fraction_per_update,
    is_checkpoint_due,
    is_evaluation_due,
    num_updates,
    point_after,
    spent_fraction,
    stop_reason,
)
from adloco_dist.policy.link import (
    effective_workers,
    first_rhythm,
    remembered,
    rhythm_for_link,
    worker_speeds,
    worker_updates,
)
from adloco_dist.policy.merging import Merge, TrainerView, choose_merge
from adloco_dist.policy.plan import NONFINITE, REPLAYED, CheckpointId, PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.report import smallest_capacity
from adloco_dist.policy.schedule import Progress


def plan_round(settings: Settings, inputs: PlanInputs, last: RoundPlan | None, found: PoolReport | None) -> RoundPlan:
    """The plan of the round after `last`, or of the first round. Every step uses what was decided before it.

    Args:
        found: what came of the round before `last`, as reports travel while that is computed; of the state before
            training, for the first round; None, for the second: nothing is known of a round yet.
    """
    algorithm, batching, wire = settings.algorithm, settings.batching, settings.wire
    report = found or PoolReport()
    if inputs.plans:
        return _repeated(inputs.plans, last, report)
    now, budget = point_after(last, begin_seconds(last, report)), settings.budget_amount
    fraction = spent_fraction(budget, now)
    outer_steps, nonfinite_rounds, unmeasured = 0, dict[int, int](), 0
    if last:
        outer_steps, nonfinite_rounds = last.outer_steps + report.outer_steps, dict(last.nonfinite_rounds)
        if found:
            nonfinite_rounds = {trainer: nonfinite_rounds.get(trainer, 0) + 1 for trainer in sorted(found.nonfinite)}
        # The updates of the last round that measured are among them.
        unmeasured = last.updates + (0 if last.measures else last.updates_since_measured)
    stop = stop_reason(settings, now, outer_steps, nonfinite_rounds, report)

    pool = _pool_before_merge(inputs, last, report)
    if last:
        pool = replace(pool, layout=last.remaining)
    measured = {trainer: _measured(last, report, trainer) for trainer in pool.layout.trainers}
    batches_before = last.batches if last else {}
    targets: dict[int, BatchTarget] = {}
    for trainer in pool.layout.trainers:
        bounds, before = _batch_inputs(settings, pool, trainer, {}), batches_before.get(trainer)
        replayed = inputs.trajectory.batches.get(now.rounds, {}).get(trainer)
        targets[trainer] = next_target(batching, bounds, before, measured[trainer], replayed, fraction, now.tokens)

    merge = None
    if last and found and stop is None:
        merge = _merge(settings, inputs, targets, last, report)
    if merge:
        pool = _pool_after(merge, pool, settings.data.shards is Shards.disjoint, report.capacities)
        targets = _targets_after(merge, targets)

    layout, follows_link = pool.layout, algorithm.round is RoundLength.link
    is_as_before = last is not None and not last.merge and not last.leaving
    costs = remembered(last.costs, report.cost) if last and is_as_before and follows_link else ()
    speeds = {} if merge else worker_speeds(layout, costs)
    batches: dict[int, BatchPlan] = {}
    for trainer in layout.trainers:
        bounds, before = _batch_inputs(settings, pool, trainer, speeds), batches_before.get(trainer)
        batches[trainer] = take(batching, bounds, targets[trainer], before, measured[trainer])
    sequences_per_update = sum(layout.num_workers(trainer) * batch.local_batch for trainer, batch in batches.items())
    tokens_per_update = sequences_per_update * settings.data.sequence_length
    # Of which slower workers take a part, beside an update of the fastest.
    in_time = {trainer: sum(speeds.get(trainer, (1.0,) * layout.num_workers(trainer))) for trainer in batches}
    taken_per_update = settings.data.sequence_length * sum(
        in_time[trainer] * batch.local_batch for trainer, batch in batches.items()
    )

    rhythm = first_rhythm(algorithm, wire)
    if last and follows_link and any(layout.num_workers(trainer) > 1 for trainer in layout.trainers):
        rhythm = rhythm_for_link(algorithm, wire, costs, last.rhythm)
    updates = num_updates(budget, now, taken_per_update, rhythm.updates)
    update_seconds = report.round_seconds / report.updates if report.updates else 0.0
    spent_per_update = fraction_per_update(budget, taken_per_update, rhythm.updates, update_seconds)
    worker_counts, owed = dict[int, tuple[int, ...]](), dict[int, tuple[float, ...]]()
    for trainer, of_workers in speeds.items():
        owed_before = (last.owed_updates if last else {}).get(trainer, (0.0,) * len(of_workers))
        counts, parts = worker_updates(updates, of_workers, owed_before)
        worker_counts[trainer], owed[trainer] = tuple(counts), tuple(parts)
    fraction_before = last.progress.fraction if last else 0.0
    keeps_state = _keeps_state(settings, last, now, stop, report)
    return RoundPlan(
        round=now.rounds,
        stop=stop,
        error="; ".join(report.errors) or None,
        pool_tokens=now.tokens,
        seconds=now.seconds,
        merge=merge,
        probed=layout.ranks(merge.survivor) if merge else (),
        layout=layout,
        shard_sequences=pool.shard_sequences,
        batches=batches,
        measures=batching.measures_gradients and (last is None or unmeasured >= batching.every_updates),
        updates_since_measured=unmeasured,
        rhythm=rhythm,
        updates=updates,
        events=round_events(rhythm.updates, wire.fragments, rhythm.delay_updates, updates, is_mixed=wire.is_delayed),
        was_in_four_bits=bool(last and last.rhythm.in_four_bits),
        costs=costs,
        worker_updates=worker_counts,
        owed_updates=owed,
        progress=Progress(tokens_per_update, fraction, spent_per_update),
        evaluate=is_evaluation_due(settings.evaluation, now.rounds + 1, fraction, fraction_before),
        is_concurrent=inputs.is_concurrent,
        checkpoint=keeps_state,
        last_checkpoint=now if keeps_state else last.last_checkpoint if last else CheckpointId(),
        nonfinite_rounds={trainer: count for trainer, count in nonfinite_rounds.items() if trainer in layout.workers},
        outer_steps=outer_steps,
    )


def _repeated(plans: Sequence[RoundPlan], last: RoundPlan | None, report: PoolReport) -> RoundPlan:
    """The recorded plan of the round after `last`, unless ranks disagree; after the last one that was recorded, the
    end."""
    number, error = last.round + 1 if last else 0, "; ".join(report.errors) or None
    if number < len(plans):
        return replace(plans[number], error=error)
    plan = plans[-1]
    return replace(
        plan,
        round=number,
        stop=plan.stop or REPLAYED,
        error=error,
        pool_tokens=plan.pool_tokens + plan.round_tokens,
        merge=None,
        probed=(),
        checkpoint=False,
    )


def _measured(last: RoundPlan | None, report: PoolReport, trainer: int) -> BatchReport:
    """What a trainer has measured: nothing, where it was another one in that round, before the merge of `last`."""
    nothing = BatchReport(is_measured=False)
    if last and last.merge and trainer in last.merge.shares:
        return nothing
    return report.batches.get(trainer, nothing)


def _pool_before_merge(inputs: PlanInputs, last: RoundPlan | None, report: PoolReport) -> PlanInputs:
    """The pool of the last round; batch limits are those that ranks found in it, where a merge made them probe."""
    if last is None:
        return inputs
    limits = {trainer: batch.batch_limit for trainer, batch in last.batches.items()}
    pool = replace(inputs, layout=last.layout, shard_sequences=last.shard_sequences, batch_limits=limits)
    on_probed = [trainer for trainer in last.layout.trainers if set(report.probed) & set(last.layout.ranks(trainer))]
    return _probed(pool, on_probed, report.capacities)


def _pool_after(merge: Merge, pool: PlanInputs, unites_shards: bool, capacities: Sequence[int | None]) -> PlanInputs:
    """The pool after a merge; the survivor reads its members' shards, unless every trainer reads everything."""
    sizes = {trainer: size for trainer, size in pool.shard_sequences.items() if trainer not in merge.ended}
    if unites_shards and merge.survivor in sizes:
        sizes[merge.survivor] = sum(pool.shard_sequences.get(member, 0) for member in merge.shares)
    pool = replace(pool, layout=merge.layout_after(pool.layout), shard_sequences=sizes)
    return _probed(pool, [merge.survivor], capacities)


def _probed(pool: PlanInputs, trainers: Collection[int], capacities: Sequence[int | None]) -> PlanInputs:
    """The same pool; the batch limits of some trainers are the smallest capacities of their ranks."""
    limits = dict(pool.batch_limits)
    for trainer in trainers if capacities else ():
        limits[trainer] = smallest_capacity(capacities[rank] for rank in pool.layout.ranks(trainer))
    return replace(pool, batch_limits=limits)


def _batch_inputs(
    settings: Settings, pool: PlanInputs, trainer: int, speeds: Mapping[int, Sequence[float]]
) -> BatchInputs:
    """What bounds a trainer's batch, and divides it among workers that take updates in proportion to their speeds."""
    return BatchInputs(
        pool.layout.num_workers(trainer),
        pool.shard_sequences.get(trainer),
        pool.batch_limits.get(trainer),
        effective_workers(speeds[trainer]) if trainer in speeds else None,
        settings.inner.optimizer,
    )


def _targets_after(merge: Merge, targets: Mapping[int, BatchTarget]) -> dict[int, BatchTarget]:
    """The survivor keeps its own request, and goes on with what was measured of all members."""
    members = [(share, targets[member].smoothed) for member, share in merge.shares.items()]
    survivor = replace(targets[merge.survivor], smoothed=Smoothed.of_merged(members))
    kept = {trainer: target for trainer, target in targets.items() if trainer not in merge.shares}
    return {**kept, merge.survivor: survivor}


def _merge(
    settings: Settings, inputs: PlanInputs, targets: Mapping[int, BatchTarget], last: RoundPlan, report: PoolReport
) -> Merge | None:
    """The merge before the round after `last`, if any; that of the recorded run where its batches are replayed."""
    num_rounds = last.round + 1
    if settings.batching.request is BatchRequest.replay:
        merge = inputs.trajectory.merges.get(num_rounds)
        return merge and replace(merge, policy=BatchRequest.replay.name)
    if num_rounds % settings.merge.every_rounds:
        return None
    candidates = {
        trainer: TrainerView(
            request=target.request,
            bounded=target.bounded,
            is_finite=trainer not in report.not_finite,
            train_loss=report.train_loss.get(trainer),
            validation_loss=report.validation_loss.get(trainer),
            statistics=target.smoothed.statistics,
            tokens=last.sequences(trainer) * settings.data.sequence_length,
            ranks=(ranks := last.remaining.ranks(trainer)),
            link_bytes_per_second=inputs.network.slowest_link(ranks),
        )
        for trainer, target in targets.items()
    }
    return choose_merge(settings.merge, candidates)


def _keeps_state(
    settings: Settings, last: RoundPlan | None, now: CheckpointId, stop: str | None, report: PoolReport
) -> bool:
    """Whether a checkpoint is written before the round; there is none of a state that nobody should resume."""
    if last is None or report.errors or report.not_finite or (report.is_writing and stop is None):
        return False
    if stop is not None:
        return stop == NONFINITE  # which resumes with other settings
    return is_checkpoint_due(settings.checkpoint, last.last_checkpoint, now)
