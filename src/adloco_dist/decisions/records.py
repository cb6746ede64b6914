"""How reports and plans add up to one record for each trainer and round: the rows of metrics.jsonl."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from adloco_dist.config import BatchRequest, Settings
from adloco_dist.decisions.batch import BatchPlan
from adloco_dist.decisions.evaluation import Evaluation
from adloco_dist.decisions.merging import Merge, Standing
from adloco_dist.decisions.plan import RoundPlan
from adloco_dist.decisions.regrouping import Regrouping
from adloco_dist.decisions.report import RankReport, TrainerReport, measured, shares_by_trainer
from adloco_dist.decisions.statistics import GradientStatistics
from adloco_dist.decisions.switch import least, pass_size

Record = dict[str, Any]


def round_records(
    settings: Settings, plan: RoundPlan | None, next_plan: RoundPlan, reports: Sequence[RankReport]
) -> list[Record]:
    """One record for each trainer: the rows of metrics.jsonl.

    Args:
        plan: of the round that the reports are about; None for the state before training.
        next_plan: what was decided from the reports: it holds the statistics smoothed over this round.
    """
    shares = shares_by_trainer(reports)
    records = [_record(settings, plan, trainer, shares[trainer]) for trainer in sorted(shares)]
    for record in records:
        trainer = record["trainer"]
        if plan and plan.regrouping and trainer in plan.regrouping.origins:
            record |= _regrouping(settings, plan, plan.regrouping, trainer, reports)
            record["seconds"]["regroup"] = max(rank.regroup_seconds for rank, _ in shares[trainer])
            record["bytes_sent"]["merge"] = sum(report.merge_bytes_sent.get(trainer, 0) for report in reports)
        if plan and settings.measures_gradients:
            record |= _statistics(measured(shares[trainer]), next_plan.batches.get(trainer))
    # What ranks without workers sent belongs to no trainer more than to another.
    unclaimed = sum(report.control_bytes_sent for report in reports if not report.trainers)
    for place, record in enumerate(records):
        record["bytes_sent"]["control"] += _even_part(unclaimed, place, len(records))
    return records


def candidate_name(trainer: int) -> str:
    """What a trainer is called in the result of a run."""
    return f"trainer {trainer}"


def _record(
    settings: Settings, plan: RoundPlan | None, trainer: int, shares: list[tuple[RankReport, TrainerReport]]
) -> Record:
    reports = [share for _, share in shares]
    record: Record = {
        "round": plan.round + 1 if plan else 0,
        "trainer": trainer,
        "ranks": [rank.rank for rank, _ in shares],
        "workers": sum(share.num_workers for share in reports),
        "cursor": reports[0].cursor,
    }
    if plan:
        sequences = plan.updates * plan.total_batch(trainer)
        record |= {
            "plan": shares[0][0].plan_digest,
            "updates": plan.updates,
            "sequences": sequences,
            "tokens": sequences * settings.data.sequence_length,
            "targets": sum(share.num_targets for share in reports),
            "data_seconds": max(share.data_seconds for share in reports),
            "resources": {rank.rank: rank.resources for rank, _ in shares},
            "pool_tokens": plan.pool_tokens + plan.updates * plan.progress.tokens_per_update,
            "total_batch": plan.total_batch(trainer),
            **_batch(plan.batches[trainer], shares),
            "train_loss": sum(share.train_loss_sum for share in reports) / record["workers"],
            "finite_workers": reports[0].num_finite,
            "spoilt_workers": sorted(worker for share in reports for worker in share.spoilt),
            "pseudo_gradient_norm": reports[0].pseudo_gradient_norm,
        }
    if evaluated := [share.validation for share in reports if share.validation]:
        record |= sum(evaluated, Evaluation()).figures(settings.data.is_labelled)
    record["seconds"] = _slowest([share.seconds for share in reports])
    record["seconds"]["control"] = max(rank.control_seconds for rank, _ in shares)
    record["bytes_sent"] = _total([share.bytes_sent for share in reports])
    record["bytes_sent"]["control"] = sum(_control_share(rank, trainer) for rank, _ in shares)
    return record


def _batch(batch: BatchPlan, shares: list[tuple[RankReport, TrainerReport]]) -> Record:
    """Why the batch was what it was, and how the trainer's tightest rank took it."""
    micro_batch = pass_size(batch.local_batch, least(batch.batch_limit, *(rank.capacity for rank, _ in shares)))
    notes = [f"rank {rank.rank}: {note}" for rank, share in shares for note in share.notes]
    return {
        "local_batch": batch.local_batch,
        "request": batch.request,
        "bounded_request": batch.bounded,
        "bound": batch.bound,
        "mode": batch.mode,
        "batch_limit": batch.batch_limit,
        "switch_n": batch.switch_n,
        "micro_batch": micro_batch,
        "passes": -(-batch.local_batch // micro_batch),
        "notes": [batch.note, *notes] if batch.note else notes,
    }


def _statistics(measured: GradientStatistics | None, next_batch: BatchPlan | None) -> Record:
    """What was measured in the round, and the averages on which the next round's request stands, if there is one."""
    smoothed = next_batch.smoothed.statistics if next_batch else None
    return {
        "statistics": asdict(measured) if measured else None,
        "smoothed": asdict(smoothed) if smoothed else None,
        "noise_scale": smoothed.noise_scale if smoothed else None,
    }


def _regrouping(
    settings: Settings, plan: RoundPlan, regrouping: Regrouping, trainer: int, reports: Sequence[RankReport]
) -> Record:
    """How a trainer came to be what it was in the round."""
    told: Record = {"origins": regrouping.origins[trainer]}
    for merge in regrouping.merges:
        if merge.survivor == trainer:
            idle = [report.rank for report in reports if report.rank in plan.probed and not report.trainers]
            is_replay = settings.batching.request is BatchRequest.replay
            policy = BatchRequest.replay.name if is_replay else settings.merge.policy.name
            told["merge"] = {**asdict(merge), "policy": policy, "idle_ranks": idle}
    return told


def _slowest(seconds: list[dict[str, float]]) -> dict[str, float]:
    phases = {phase for rank in seconds for phase in rank}
    return {phase: max(rank.get(phase, 0.0) for rank in seconds) for phase in sorted(phases)}


def _total(bytes_sent: list[dict[str, int]]) -> dict[str, int]:
    kinds = {kind for rank in bytes_sent for kind in rank}
    return {kind: sum(rank.get(kind, 0) for rank in bytes_sent) for kind in sorted(kinds)}


def _control_share(report: RankReport, trainer: int) -> int:
    """A rank's control bytes, dealt evenly to the trainers that it hosts."""
    hosted = sorted(report.trainers)
    return _even_part(report.control_bytes_sent, hosted.index(trainer), len(hosted))


def _even_part(whole: int, place: int, num_parts: int) -> int:
    """Part `place` of a number dealt evenly; the parts add up exactly."""
    return whole * (place + 1) // num_parts - whole * place // num_parts


def merge_in_words(row: Record) -> str:
    """The merge that a survivor's record tells of."""
    merge, ranks, idle = Merge.from_message(row["merge"]), row["ranks"], row["merge"]["idle_ranks"]
    ended = [
        f"{id} ({_asked(merge.standings[id])})" if merge.shares[id] else f"{id} (left out: not finite)"
        for id in merge.ended
    ]
    told = [
        f"before round {row['round']}: trainer{'s' if len(ended) > 1 else ''} {', '.join(ended)} into "
        f"{merge.survivor} ({_asked(merge.standings[merge.survivor])}), {row['merge']['policy']}",
        f"ranks {set_of_ranks(ranks)} now average together" if len(ranks) > 1 else f"all on rank {ranks[0]}",
    ]
    if idle:
        told.append(f"ranks {set_of_ranks(idle)} idle" if len(idle) > 1 else f"rank {idle[0]} idle")
    return "; ".join(told)


def spoilt_in_words(row: Record) -> str:
    """The workers that were left out of a trainer's outer step."""
    spoilt, num_finite = row["spoilt_workers"], row["finite_workers"]
    told = f"worker{'s' if len(spoilt) > 1 else ''} {', '.join(map(str, spoilt))} not finite, left out"
    rest = f"{num_finite} of {row['workers']} averaged" if num_finite else "no outer step"
    return f"round {row['round']}, trainer {row['trainer']}: {told}; {rest}"


def _asked(standing: Standing) -> str:
    """A request, and what the bounds made of it, which is what the trainer counts for."""
    request = f"asked for {standing.request:,.4g}" if standing.request < math.inf else "asked for any batch"
    return request if standing.bounded == standing.request else f"{request}, bounded to {standing.bounded:,.4g}"


def set_of_ranks(ranks: Sequence[int]) -> str:
    """{0,1,4-7}"""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    told = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(told) + "}"
