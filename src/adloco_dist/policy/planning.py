"""How rank 0 decides a round's plan from the last one and what was reported (docs/architecture.md, "A round")."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from adloco_dist.averaging.schedule import round_events
from adloco_dist.config import BatchRequest, RoundLength, Settings, Shards
from adloco_dist.noise.statistics import Smoothed
from adloco_dist.policy.batch import BatchInputs, BatchReport, BatchTarget, Spent, next_target, take
from adloco_dist.policy.budget import (
    Position,
    fraction_per_update,
    is_checkpoint_due,
    is_evaluation_due,
    num_updates,
    position_after,
    stop_reason,
)
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import Rhythm, RoundCost, first_rhythm, remembered, rhythm_for_link
from adloco_dist.policy.merging import Merge, TrainerView, choose_merge
from adloco_dist.policy.pace import effective_workers, worker_updates
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, CheckpointId, PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.report import smallest_capacity
from adloco_dist.policy.schedule import Progress


@dataclass(frozen=True)
class _Pool:
    """The trainers, and what bounds their batches; by trainer."""

    layout: Layout
    shard_sequences: Mapping[int, int]
    batch_limits: Mapping[int, int | None]

    def inputs(self, trainer: int, paces: Mapping[int, Sequence[int]] = {}) -> BatchInputs:
        """What bounds a trainer's batch, and divides it among workers that take unequal numbers of updates."""
        return BatchInputs(
            self.layout.num_workers(trainer),
            self.shard_sequences.get(trainer),
            self.batch_limits.get(trainer),
            effective_workers(paces[trainer]) if trainer in paces else None,
        )

    def after(self, merge: Merge, unites_shards: bool, capacities: Sequence[int | None]) -> "_Pool":
        """The pool after a merge.

        Args:
            unites_shards: a survivor reads its members' shards; else every trainer reads everything.
            capacities: of the ranks.
        """
        sizes = {trainer: size for trainer, size in self.shard_sequences.items() if trainer not in merge.ended}
        if unites_shards and merge.survivor in sizes:
            sizes[merge.survivor] = sum(self.shard_sequences.get(member, 0) for member in merge.shares)
        return _Pool(merge.layout_after(self.layout), sizes, self.batch_limits).probed([merge.survivor], capacities)

    def probed(self, trainers: Collection[int], capacities: Sequence[int | None]) -> "_Pool":
        """The same with the smallest capacity of their ranks as batch limits of some trainers."""
        limits = dict(self.batch_limits)
        for trainer in trainers if capacities else ():
            limits[trainer] = smallest_capacity(capacities[rank] for rank in self.layout.ranks(trainer))
        return replace(self, batch_limits=limits)


def plan_round(settings: Settings, inputs: PlanInputs, last: RoundPlan | None, report: PoolReport) -> RoundPlan:
    """The plan of the round after `last`, or of the first round. Every step uses what was decided before it."""
    algorithm, batching, wire = settings.algorithm, settings.batching, settings.wire
    position = position_after(last, report)
    budget = settings.budget_amount
    fraction = position.spent_fraction(budget)
    stop = stop_reason(settings, position, report)

    pool = _pool_before_merge(inputs, last, report)
    measured = {trainer: report.batches.get(trainer, BatchReport()) for trainer in pool.layout.trainers}
    batches_before = last.batches if last else {}
    targets = {
        trainer: next_target(
            batching,
            pool.inputs(trainer),
            batches_before.get(trainer),
            measured[trainer],
            inputs.trajectory.total_batch(trainer, position.rounds),
            Spent(fraction, position.tokens),
        )
        for trainer in pool.layout.trainers
    }

    merge = None
    if last and stop in (None, INTERRUPTED):  # a run that is asked to stop has the plan with which it resumes
        merge = _merge(settings, inputs, position, targets, last, report)
    if merge:
        pool = pool.after(merge, settings.data.shards is Shards.disjoint, report.capacities)
        targets = _targets_after(merge, targets)

    speeds = report.update_seconds
    paces = worker_updates(algorithm.round, pool.layout, algorithm.updates_per_round, speeds, {})
    batches = {
        trainer: take(
            batching, pool.inputs(trainer, paces), targets[trainer], batches_before.get(trainer), measured[trainer]
        )
        for trainer in pool.layout.trainers
    }
    sequences_per_update = sum(
        pool.layout.num_workers(trainer) * batch.local_batch for trainer, batch in batches.items()
    )
    tokens_per_update = sequences_per_update * settings.data.sequence_length

    growth = {
        trainer: batch.local_batch / last.batches[trainer].local_batch for trainer, batch in batches.items() if last
    }
    costs: tuple[RoundCost, ...] = ()  # since trainers merged last
    if algorithm.round is RoundLength.link:
        rhythm = first_rhythm(algorithm, wire)
        if last:
            costs = remembered(() if last.merge else last.costs, report.cost)
            if any(pool.layout.num_workers(trainer) > 1 for trainer in pool.layout.trainers):
                rhythm = rhythm_for_link(algorithm, wire, costs, last.rhythm)
    else:
        rhythm = Rhythm(algorithm.updates_per_round, wire.delay_updates or 0)
    updates = num_updates(budget, position, tokens_per_update, rhythm.updates)
    update_seconds = max(0.0, position.seconds - last.seconds) / last.updates if last else 0.0
    unmeasured = 0
    if last:  # the updates of the last round that measured are among them
        unmeasured = last.updates + (0 if last.measures else last.updates_since_measured)
    checkpoint = _checkpoint(settings, last, position, stop, report)
    return RoundPlan(
        round=position.rounds,
        stop=stop,
        error="; ".join(report.errors) or None,
        pool_tokens=position.tokens,
        seconds=position.seconds,
        merge=merge,
        probed=pool.layout.ranks(merge.survivor) if merge else (),
        layout=pool.layout,
        shard_sequences=pool.shard_sequences,
        batches=batches,
        measures=batching.measures_gradients and (last is None or unmeasured >= batching.every_updates),
        updates_since_measured=unmeasured,
        rhythm=rhythm,
        updates=updates,
        events=round_events(rhythm.updates, wire.fragments, rhythm.delay_updates, updates),
        costs=costs,
        worker_updates=worker_updates(algorithm.round, pool.layout, updates, speeds, growth),
        progress=Progress(
            tokens_per_update,
            fraction,
            fraction_per_update(budget, tokens_per_update, rhythm.updates, update_seconds),
        ),
        evaluate=is_evaluation_due(
            settings.evaluation, position.rounds + 1, fraction, last.progress.fraction if last else 0.0
        ),
        is_concurrent=inputs.is_concurrent,
        checkpoint=checkpoint is not None,
        last_checkpoint=checkpoint or (last.last_checkpoint if last else CheckpointId()),
        nonfinite_rounds={
            trainer: count for trainer, count in position.nonfinite_rounds.items() if trainer in pool.layout.workers
        },
        outer_steps=position.outer_steps,
    )


def _pool_before_merge(inputs: PlanInputs, last: RoundPlan | None, report: PoolReport) -> _Pool:
    """The pool of the last round; batch limits are those that ranks found in it, where a merge made them probe."""
    if last is None:
        return _Pool(inputs.layout, inputs.shard_sequences, inputs.batch_limits)
    limits = {trainer: batch.batch_limit for trainer, batch in last.batches.items()}
    on_probed = [trainer for trainer in last.layout.trainers if set(last.probed) & set(last.layout.ranks(trainer))]
    return _Pool(last.layout, last.shard_sequences, limits).probed(on_probed, report.capacities)


def _targets_after(merge: Merge, targets: Mapping[int, BatchTarget]) -> dict[int, BatchTarget]:
    """The survivor keeps its own request, and goes on with what was measured of all members."""
    members = [(share, targets[member].smoothed) for member, share in merge.shares.items()]
    survivor = replace(targets[merge.survivor], smoothed=Smoothed.of_merged(members))
    kept = {trainer: target for trainer, target in targets.items() if trainer not in merge.shares}
    return {**kept, merge.survivor: survivor}


def _merge(
    settings: Settings,
    inputs: PlanInputs,
    position: Position,
    targets: Mapping[int, BatchTarget],
    last: RoundPlan,
    report: PoolReport,
) -> Merge | None:
    """The merge before this round, if any; that of the recorded run where its batches are replayed."""
    if settings.batching.request is BatchRequest.replay:
        merge = inputs.trajectory.merges.get(position.rounds)
        return merge and replace(merge, policy=BatchRequest.replay.name)
    if position.rounds % settings.merge.every_rounds:
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
            ranks=(ranks := last.layout.ranks(trainer)),
            link_bytes_per_second=inputs.network.slowest_link(ranks),
        )
        for trainer, target in targets.items()
    }
    return choose_merge(settings.merge, candidates)


def _checkpoint(
    settings: Settings, last: RoundPlan | None, position: Position, stop: str | None, report: PoolReport
) -> CheckpointId | None:
    """The checkpoint that is written before the round, if any; there is none of a state that nobody should resume."""
    if last is None or report.errors or report.not_finite or (report.is_writing and stop is None):
        return None
    number = last.last_checkpoint.number + 1
    now = CheckpointId(number, position.rounds, position.tokens, position.seconds)
    resumes_later = stop in (INTERRUPTED, NONFINITE)
    continues = stop is None and is_checkpoint_due(settings.checkpoint, last.last_checkpoint, now)
    return now if resumes_later or continues else None
