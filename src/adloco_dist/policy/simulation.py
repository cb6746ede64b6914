"""A simulated clock: the seconds of a round from what was counted in it, in place of those that were measured."""

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from adloco_dist.config import SimulationSettings
from adloco_dist.policy.forecast import RoundForecast
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import EvaluationReport, RankReport, TrainerReport

HIDDEN_GRADIENTS = 2 / 3
"""Share of an update in which DistributedDataParallel's averages may travel: the backward pass."""


def simulated(
    simulation: SimulationSettings, fragments: int, plan: RoundPlan, reports: Sequence[RankReport]
) -> list[RankReport]:
    """The reports of a round of so many fragments as if every rank were a host of its own; evaluations and checkpoints
    take no time. Ranks wait for the slowest in report and plan."""
    timed = [_without_waiting(simulation, fragments, plan, report) for report in reports]
    spent = [_seconds(report) for report in timed]
    latency = 2 * simulation.latency_seconds  # of the report, and of the plan
    return [
        replace(report, control_seconds=latency + max(spent) - seconds, checkpoint_seconds=0.0)
        for report, seconds in zip(timed, spent, strict=True)
    ]


def round_seconds(reports: Sequence[RankReport]) -> float:
    """The time of a round whose reports are simulated."""
    return max(report.control_seconds + _seconds(report) for report in reports)


def _seconds(report: RankReport) -> float:
    return sum(sum(part.seconds.values()) for part in report.trainers.values()) + report.merge.seconds


def _without_waiting(simulation: SimulationSettings, fragments: int, plan: RoundPlan, report: RankReport) -> RankReport:
    """A round that was not taken as a whole has no speed, as with the real clock."""
    inner_seconds = {trainer: _inner_seconds(simulation, plan, report.rank, trainer) for trainer in report.trainers}
    turn = sum(inner_seconds.values()) / plan.updates  # one update of all workers, which compute while averages travel
    latency, delay = simulation.latency_seconds, plan.rhythm.delay_updates
    trainers: dict[int, TrainerReport] = {}
    for trainer, part in report.trainers.items():
        sent, seconds = part.outer.bytes_sent, inner_seconds[trainer]
        transfer = (fragments * latency if sent else 0.0) + simulation.transfer_seconds(sent)
        waited = RoundForecast(plan.updates, delay, transfer, fragments).exposed_seconds(turn)
        gradients = simulation.transfer_seconds(part.outer.gradient_bytes_sent)
        measured = simulation.transfer_seconds(part.measure.bytes_sent) + latency if part.measure.seconds else 0.0
        per_sequence = simulation.sequence_seconds * part.num_workers
        trainers[trainer] = replace(
            part,
            inner=replace(part.inner, seconds=seconds, compute_seconds_per_sequence=per_sequence),
            measure=replace(part.measure, seconds=measured),
            outer=dataclasses.replace(
                part.outer,
                seconds=waited + max(0.0, gradients - HIDDEN_GRADIENTS * seconds),
                transfer_seconds=transfer if delay else 0.0,
                wait_seconds=waited if delay else 0.0,
            ),
            evaluation=EvaluationReport(part.evaluation.sums),
        )
    workers = sum(part.num_workers for part in report.trainers.values()) if report.update_seconds else 0
    merge = replace(report.merge, seconds=simulation.transfer_seconds(report.merge.bytes_sent))
    update_seconds = turn / workers if workers else 0.0
    return replace(report, trainers=trainers, merge=merge, update_seconds=update_seconds)


def _inner_seconds(simulation: SimulationSettings, plan: RoundPlan, rank: int, trainer: int) -> float:
    each = (simulation.update_seconds or 0.0) + plan.batches[trainer].local_batch * simulation.sequence_seconds
    return each * sum(plan.updates_of(trainer, worker) for worker in plan.layout.workers_on(rank, trainer))
