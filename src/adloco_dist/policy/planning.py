"""How rank 0 decides a round's plan from the last one and what was reported (docs/architecture.md, "A round")."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from adloco_dist.config import BatchRequest, RoundLength, Settings, Shards
from adloco_dist.noise.statistics import Smoothed
from adloco_dist.policy.batch import BatchInputs, BatchReport, BatchTarget, Spent, first_target, next_target, take
from adloco_dist.policy.budget import (
    Position,
    fraction_per_update,
    num_updates,
    position_after,
    seconds_per_update,
    spent_fraction,
    stop_reason,
)
from adloco_dist.policy.checkpoints import CheckpointId, is_due
from adloco_dist.policy.evaluation import is_due as is_evaluation_due
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import Rhythm, RoundCost, first_rhythm, remembered, rhythm_for_link
from adloco_dist.policy.merging import Merge, choose_merges
from adloco_dist.policy.pace import effective_workers, max_updates, worker_updates
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.regrouping import Regrouping, assign_workers
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.schedule import Progress
from adloco_dist.policy.switch import min_limit
from adloco_dist.policy.views import Network, TrainerView


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


def plan_round(settings: Settings, inputs: PlanInputs, last: RoundPlan | None, report: PoolReport) -> RoundPlan:
    """The plan of the round after `last`, or of the first round. Every step uses what was decided before it."""
    position = position_after(last, report)
    fraction = spent_fraction(settings, position)
    stop = stop_reason(settings, position, report)

    pool = _pool_before_merges(settings, inputs, last, report)
    targets = _batch_targets(settings, inputs.trajectory, pool, position, fraction, last, report)

    regrouping = None
    if last and stop in (None, INTERRUPTED):  # a run that is asked to stop has the plan with which it resumes
        regrouping = _regrouping(settings, inputs, pool, position, targets, last, report)
    if regrouping:
        pool = _pool_after(settings, pool, regrouping, report.capacities)
        targets = _targets_after(regrouping, targets)

    speeds = report.update_seconds
    paces = worker_updates(settings, pool.layout, settings.algorithm.updates_per_round, speeds, {})
    batches = {
        trainer: take(settings, pool.inputs(trainer, paces), targets[trainer], last.batches[trainer] if last else None,
                      report.batches.get(trainer, BatchReport()))
        for trainer in pool.layout.trainers
    }  # fmt: skip
    sequences_per_update = sum(
        pool.layout.num_workers(trainer) * batch.local_batch for trainer, batch in batches.items()
    )
    tokens_per_update = sequences_per_update * settings.data.sequence_length

    growth = {
        trainer: batch.local_batch / last.batches[trainer].local_batch for trainer, batch in batches.items() if last
    }
    costs = _costs(settings, last, report)
    if settings.algorithm.round is RoundLength.link:
        averages = any(pool.layout.num_workers(trainer) > 1 for trainer in pool.layout.trainers)
        rhythm = rhythm_for_link(settings, costs, last.rhythm) if last and averages else first_rhythm(settings)
    else:
        rhythm = Rhythm(max_updates(settings, pool.layout, speeds, growth), settings.wire.delay_updates or 0)
    updates = num_updates(settings, position, tokens_per_update, rhythm.updates)
    unmeasured = _updates_since_measured(last)
    checkpoint = _checkpoint(settings, last, position, stop, report)
    last_fraction = last.progress.fraction if last else 0.0
    return RoundPlan(
        round=position.rounds,
        stop=stop,
        error="; ".join(report.errors) or None,
        pool_tokens=position.tokens,
        seconds=position.seconds,
        regrouping=regrouping,
        probed=tuple(sorted(regrouping.ranks(last.layout))) if regrouping and last else (),
        layout=pool.layout,
        shard_sequences=pool.shard_sequences,
        batches=batches,
        measures=settings.measures_gradients and (last is None or unmeasured >= settings.batching.every_updates),
        updates_since_measured=unmeasured,
        rhythm=rhythm,
        updates=updates,
        costs=costs,
        worker_updates=worker_updates(settings, pool.layout, updates, speeds, growth),
        progress=Progress(
            tokens_per_update,
            fraction,
            fraction_per_update(settings, tokens_per_update, rhythm.updates, seconds_per_update(last, position)),
        ),
        evaluate=is_evaluation_due(settings.evaluation, position.rounds + 1, fraction, last_fraction),
        is_concurrent=inputs.is_concurrent,
        checkpoint=checkpoint is not None,
        last_checkpoint=checkpoint or (last.last_checkpoint if last else CheckpointId()),
        nonfinite_rounds={
            trainer: count for trainer, count in position.nonfinite_rounds.items() if trainer in pool.layout.workers
        },
        outer_steps=position.outer_steps,
    )


def _updates_since_measured(last: RoundPlan | None) -> int:
    """Updates of the rounds since the last one that measured, that one's included."""
    if last is None:
        return 0
    return last.updates if last.measures else last.updates_since_measured + last.updates


def _costs(settings: Settings, last: RoundPlan | None, report: PoolReport) -> tuple[RoundCost, ...]:
    """What rounds have cost since ranks were regrouped last."""
    if last is None or settings.algorithm.round is not RoundLength.link:
        return ()
    return remembered(() if last.regrouping else last.costs, report.cost)


def _pool_before_merges(settings: Settings, inputs: PlanInputs, last: RoundPlan | None, report: PoolReport) -> _Pool:
    """The pool of the last round; batch limits are those that ranks found in it, where a regrouping made them probe."""
    if last is None:
        return _Pool(inputs.layout, inputs.shard_sequences, inputs.batch_limits)
    limits = {trainer: batch.batch_limit for trainer, batch in last.batches.items()}
    if last.probed:
        trainers = [one for one in last.layout.trainers if set(last.probed) & set(last.layout.ranks(one))]
        limits = _probed_limits(settings, last.layout, limits, trainers, report.capacities)
    return _Pool(last.layout, last.shard_sequences, limits)


def _batch_targets(
    settings: Settings, trajectory: Trajectory, pool: _Pool, position: Position, fraction: float,
    last: RoundPlan | None, report: PoolReport,
) -> dict[int, BatchTarget]:  # fmt: skip
    """Every trainer's total batch of the round, merges aside."""
    spent = Spent(fraction, position.tokens)
    targets = {}
    for trainer in pool.layout.trainers:
        replayed = trajectory.total_batch(trainer, position.rounds)
        if last is None:
            targets[trainer] = first_target(settings, pool.inputs(trainer), replayed)
            continue
        batch, measured = last.batches[trainer], report.batches.get(trainer, BatchReport())
        targets[trainer] = next_target(settings, pool.inputs(trainer), batch, measured, replayed, spent)
    return targets


def _targets_after(regrouping: Regrouping, targets: Mapping[int, BatchTarget]) -> dict[int, BatchTarget]:
    """Survivors keep their own request, and go on with what was measured of all members."""
    after = dict(targets)
    for merge in regrouping.merges:
        members = [(share, targets[member].smoothed) for member, share in merge.shares.items()]
        after[merge.survivor] = replace(targets[merge.survivor], smoothed=Smoothed.of_merged(members))
        for member in merge.ended:
            del after[member]
    return after


def _views(
    settings: Settings, network: Network, last: RoundPlan, report: PoolReport, targets: Mapping[int, BatchTarget]
) -> dict[int, TrainerView]:
    """Every trainer as policies see it."""
    return {
        trainer: TrainerView(
            request=target.request.sequences,
            bounded=target.bounded,
            is_finite=trainer not in report.not_finite,
            train_loss=report.train_loss.get(trainer),
            validation_loss=report.validation_loss.get(trainer),
            statistics=target.smoothed.statistics,
            tokens=last.sequences(trainer) * settings.data.sequence_length,
            ranks=(ranks := last.layout.ranks(trainer)),
            link_bytes_per_second=network.slowest_link(ranks),
        )
        for trainer, target in targets.items()
    }


def _regrouping(
    settings: Settings, inputs: PlanInputs, pool: _Pool, position: Position, targets: Mapping[int, BatchTarget],
    last: RoundPlan, report: PoolReport,
) -> Regrouping | None:  # fmt: skip
    """The merges before this round, if any; those of the recorded run where its batches are replayed."""
    if settings.batching.request is BatchRequest.replay:
        return inputs.trajectory.regroupings.get(position.rounds)
    if position.rounds % settings.merge.every_rounds:
        return None
    merges = choose_merges(settings.merge, _views(settings, inputs.network, last, report, targets))
    if not merges:
        return None
    requests = {trainer: target.bounded for trainer, target in targets.items()}
    sizes = _shard_sequences_after(settings, merges, pool.shard_sequences)
    return Regrouping(merges, assign_workers(pool.layout, merges, settings.merge.released_workers, requests, sizes))


def _pool_after(settings: Settings, pool: _Pool, regrouping: Regrouping, capacities: Sequence[int | None]) -> _Pool:
    layout = regrouping.layout_after(pool.layout)
    sizes = _shard_sequences_after(settings, regrouping.merges, pool.shard_sequences)
    return _Pool(layout, sizes, _probed_limits(settings, layout, pool.batch_limits, regrouping.origins, capacities))


def _shard_sequences_after(
    settings: Settings, merges: Sequence[Merge], shard_sequences: Mapping[int, int]
) -> dict[int, int]:
    """The shards' sizes after merges: a survivor reads its members' shards, unless every trainer reads everything."""
    sizes = dict(shard_sequences)
    for merge in merges:
        for trainer in merge.ended:
            size = sizes.pop(trainer, 0)
            if merge.survivor in sizes and settings.data.shards is Shards.disjoint:
                sizes[merge.survivor] += size
    return sizes


def _probed_limits(
    settings: Settings,
    layout: Layout,
    limits: Mapping[int, int | None],
    trainers: Collection[int],
    capacities: Sequence[int | None],
) -> dict[int, int | None]:
    """The batch limits of a layout: of `trainers` the smallest capacity of their ranks, unless it is set."""
    if settings.switch.batch_limit is not None or not capacities:
        trainers = ()
    return {
        trainer: min_limit(*(capacities[rank] for rank in layout.ranks(trainer)))
        if trainer in trainers
        else limits.get(trainer)
        for trainer in layout.trainers
    }


def _checkpoint(
    settings: Settings, last: RoundPlan | None, position: Position, stop: str | None, report: PoolReport
) -> CheckpointId | None:
    """The checkpoint that is written before the round, if any; there is none of a state that nobody should resume."""
    if last is None or report.errors or report.not_finite or (report.is_writing and stop is None):
        return None
    number = last.last_checkpoint.number + 1
    now = CheckpointId(number, position.rounds, position.tokens, position.seconds)
    resumes_later = stop in (INTERRUPTED, NONFINITE)
    continues = stop is None and is_due(settings.checkpoint, last.last_checkpoint, now)
    return now if resumes_later or continues else None
