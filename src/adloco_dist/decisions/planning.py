"""How rank 0 comes to a round's plan, from the last one and what was reported (design: report and plan)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from adloco_dist.config import BatchRequest, Settings, Shards
from adloco_dist.decisions.batch import BatchDemand, BatchPremises, BatchReport, first_demand, next_demand, take
from adloco_dist.decisions.checkpointing import Mark, is_due
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.merging import Merge, Standing, choose_merges
from adloco_dist.decisions.plan import INTERRUPTED, SPOILT, PoolReport, Premises, RoundPlan
from adloco_dist.decisions.regrouping import Regrouping, assign_workers
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.decisions.schedule import Progress
from adloco_dist.decisions.statistics import Smoothed
from adloco_dist.decisions.switch import least


@dataclass(frozen=True)
class _Pool:
    """Who is there, and what bounds their batches; by trainer."""

    layout: Layout
    shard_sequences: Mapping[int, int]
    batch_limits: Mapping[int, int | None]

    def premises(self, trainer: int) -> BatchPremises:
        return BatchPremises(
            self.layout.num_workers(trainer), self.shard_sequences.get(trainer), self.batch_limits.get(trainer)
        )


def plan_round(settings: Settings, premises: Premises, last: RoundPlan | None, report: PoolReport) -> RoundPlan:
    """The plan of the round after `last`, or of the first round."""
    round_ = last.round + 1 if last else 0
    pool_tokens = last.pool_tokens + last.updates * last.progress.tokens_per_update if last else 0
    fraction = _fraction(settings, round_, pool_tokens, report.seconds)
    spoilt = {id: last.spoilt_rounds.get(id, 0) + 1 for id in sorted(report.spoilt)} if last else {}
    outer_steps = last.outer_steps + len(set(last.layout.trainers) - report.unmoved) if last else 0
    stop = _stop_reason(settings, round_, pool_tokens, report, spoilt, outer_steps)
    pool = _pool(settings, premises, last, report)
    demands = _demands(settings, premises.trajectory, pool, round_, last, report, fraction)
    # A run that is asked to stop has the plan with which it will go on.
    goes_on = stop in (None, INTERRUPTED)
    regrouping = _regrouping(settings, premises.trajectory, pool, round_, demands, report) if goes_on else None
    if regrouping:
        layout = regrouping.layout_after(pool.layout)
        demands = {id: demands[id] for id in layout.trainers}  # a survivor keeps its own
        sizes = _shard_sequences_after(settings, regrouping.merges, pool.shard_sequences)
        limits = _probed_limits(settings, layout, pool.batch_limits, regrouping.origins, report.capacities)
        pool = _Pool(layout, sizes, limits)
    batches = {
        trainer: take(settings, pool.premises(trainer), demands[trainer], last.batches[trainer] if last else None,
                      report.batches.get(trainer, BatchReport()))
        for trainer in pool.layout.trainers
    }  # fmt: skip
    sequences_per_update = sum(pool.layout.num_workers(id) * batch.local_batch for id, batch in batches.items())
    tokens_per_update = sequences_per_update * settings.data.sequence_length
    every = settings.evaluation.every_rounds
    checkpoint = _checkpoint(settings, last, Mark(0, round_, pool_tokens, report.seconds), stop, report)
    return RoundPlan(
        round=round_,
        stop=stop,
        error="; ".join(report.errors) or None,
        pool_tokens=pool_tokens,
        seconds=report.seconds,
        regrouping=regrouping,
        probed=tuple(sorted(regrouping.ranks(last.layout))) if regrouping and last else (),
        layout=pool.layout,
        shard_sequences=pool.shard_sequences,
        batches=batches,
        updates=_updates(settings, pool_tokens, tokens_per_update),
        progress=Progress(pool_tokens, tokens_per_update, fraction, _fraction_per_update(settings, tokens_per_update)),
        evaluate=every is not None and (round_ + 1) % every == 0,
        is_concurrent=premises.is_concurrent,
        checkpoint=checkpoint is not None,
        last_checkpoint=checkpoint or (last.last_checkpoint if last else Mark()),
        spoilt_rounds={id: count for id, count in spoilt.items() if id in pool.layout.hosts},
        outer_steps=outer_steps,
    )


def _checkpoint(
    settings: Settings, last: RoundPlan | None, now: Mark, stop: str | None, report: PoolReport
) -> Mark | None:
    """The checkpoint that is written before the round, if any: none of a state that nobody should go on from."""
    if last is None or report.errors or report.not_finite or (report.is_writing and stop is None):
        return None
    goes_on_later = stop in (INTERRUPTED, SPOILT)
    goes_on = stop is None and is_due(settings.checkpoint, last.last_checkpoint, now)
    if not goes_on_later and not goes_on:
        return None
    return replace(now, number=last.last_checkpoint.number + 1)


def _pool(settings: Settings, premises: Premises, last: RoundPlan | None, report: PoolReport) -> _Pool:
    """The pool before this round's merges."""
    if last is None:
        return _Pool(premises.layout, premises.shard_sequences, premises.batch_limits)
    limits = {trainer: batch.batch_limit for trainer, batch in last.batches.items()}
    if last.probed:
        trainers = [id for id in last.layout.trainers if set(last.probed) & set(last.layout.hosts[id])]
        limits = _probed_limits(settings, last.layout, limits, trainers, report.capacities)
    return _Pool(last.layout, last.shard_sequences, limits)


def _probed_limits(
    settings: Settings,
    layout: Layout,
    limits: Mapping[int, int | None],
    trainers: Collection[int],
    capacities: Sequence[int | None],
) -> dict[int, int | None]:
    """`limits`, for `trainers` anew: the least capacity of a trainer's ranks, unless the settings say another."""
    given = settings.switch.batch_limit
    if given is not None or not capacities:
        trainers = ()
    return {
        id: least(*(capacities[rank] for rank in layout.ranks(id))) if id in trainers else limits.get(id)
        for id in layout.trainers
    }


def _demands(
    settings: Settings,
    trajectory: Trajectory,
    pool: _Pool,
    round_: int,
    last: RoundPlan | None,
    report: PoolReport,
    fraction: float,
) -> dict[int, BatchDemand]:
    """What every trainer's round is to take, merges aside."""
    demands = {}
    for id in pool.layout.trainers:
        replayed = trajectory.total_batch(id, round_)
        if last is None:
            demands[id] = first_demand(settings, pool.premises(id), replayed)
        else:
            batch = last.batches[id]
            if last.regrouping and any(merge.survivor == id for merge in last.regrouping.merges):
                batch = replace(batch, smoothed=Smoothed())  # its anchor is another: averages start anew
            measured = report.batches.get(id, BatchReport())
            demands[id] = next_demand(settings, pool.premises(id), batch, measured, replayed, fraction)
    return demands


def _regrouping(
    settings: Settings,
    trajectory: Trajectory,
    pool: _Pool,
    round_: int,
    demands: Mapping[int, BatchDemand],
    report: PoolReport,
) -> Regrouping | None:
    """The merges before this round, if any; those of the recorded run where its batches are replayed."""
    if settings.batching.request is BatchRequest.replay:
        return trajectory.regroupings.get(round_)
    if round_ == 0 or round_ % settings.merge.every_rounds:
        return None
    standings = {
        id: Standing(demand.request.sequences, demand.bounded, id not in report.not_finite)
        for id, demand in demands.items()
    }
    merges = choose_merges(settings.merge, standings)
    if not merges:
        return None
    requests = {id: demand.bounded for id, demand in demands.items()}
    sizes = _shard_sequences_after(settings, merges, pool.shard_sequences)
    return Regrouping(merges, assign_workers(pool.layout, merges, settings.merge.freed, requests, sizes))


def _shard_sequences_after(
    settings: Settings, merges: Sequence[Merge], shard_sequences: Mapping[int, int]
) -> dict[int, int]:
    """A survivor reads its members' shards, unless every trainer reads everything."""
    sizes = dict(shard_sequences)
    for merge in merges:
        for trainer in merge.ended:
            size = sizes.pop(trainer, 0)
            if merge.survivor in sizes and settings.data.shards is Shards.disjoint:
                sizes[merge.survivor] += size
    return sizes


def _stop_reason(
    settings: Settings, rounds: int, tokens: int, report: PoolReport, spoilt: Mapping[int, int], outer_steps: int
) -> str | None:
    if report.errors:
        return "the ranks disagree"
    if any(count >= settings.outer.spoilt_rounds for count in spoilt.values()):
        return SPOILT
    spent = {"rounds": rounds, "tokens": tokens, "seconds": report.seconds}
    for unit, limit in vars(settings.budget).items():
        if limit is not None and spent[unit] >= limit:  # the weights are those that the run began with, if no step was
            return f"budget.{unit}={limit} reached" if outer_steps or not rounds else SPOILT
    return INTERRUPTED if report.stop_requested else None


def _updates(settings: Settings, tokens: int, tokens_per_update: int) -> int:
    """A batch that has grown would overshoot a budget in tokens by up to a round: the last round is cut short."""
    updates, budget = settings.algorithm.updates_per_round, settings.budget.tokens
    if budget is None or tokens >= budget:
        return updates
    return min(updates, -(-(budget - tokens) // tokens_per_update))


def _fraction(settings: Settings, rounds: int, tokens: int, seconds: float) -> float:
    """The share of the budget that is spent, in the budget's own unit."""
    budget = settings.budget
    if budget.rounds is not None:
        return rounds / budget.rounds
    if budget.tokens is not None:
        return tokens / budget.tokens
    assert budget.seconds is not None
    return seconds / budget.seconds


def _fraction_per_update(settings: Settings, tokens_per_update: int) -> float:
    """What one update adds to it; a budget in seconds stands still within a round (no clock in between)."""
    budget = settings.budget
    if budget.rounds is not None:
        return 1 / (budget.rounds * settings.algorithm.updates_per_round)
    return tokens_per_update / budget.tokens if budget.tokens is not None else 0.0
