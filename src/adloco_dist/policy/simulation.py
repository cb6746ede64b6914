"""What rounds take that nobody measured: those of a run before it trains, and those on a simulated clock."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from adloco_dist.config import SimulationSettings, WireFormat, WireSettings
from adloco_dist.policy.link import over_signs
from adloco_dist.policy.passes import Passes
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.report import EvaluationReport, RankReport, TrainerReport


@dataclass(frozen=True)
class RoundForecast:
    """One rank's round: updates, and averages that travel while some of them are computed."""

    updates: int
    """Updates of all the rank's workers, one after the other."""
    delay_updates: int
    """Those of them that are computed while one average travels."""
    transfer_seconds: float
    """Time that the bytes of the round's averages need on the rank's slowest link."""
    fragments: int = 1
    """Averages among which they are divided."""

    def utilisation(self, update_seconds: float) -> float:
        """Share of the round that is spent in updates of that length; latencies and outer steps are not counted."""
        computing = self.updates * update_seconds
        return computing / (computing + self.exposed_seconds(update_seconds))

    def exposed_seconds(self, update_seconds: float) -> float:
        """Time of a round that workers wait for averages, with updates of that length."""
        each = self.transfer_seconds / self.fragments
        return self.fragments * max(0.0, each - self.delay_updates * update_seconds)

    def update_seconds(self, utilisation: float) -> float:
        """How long an update must take for that share, in (0, 1): shorter ones wait for averages."""
        hidden = self.fragments * self.delay_updates
        return self.transfer_seconds / (self.updates * (1 / utilisation - 1) + hidden)


def shortest_round(
    utilisation: float, update_seconds: float, transfer_seconds: float, fragments: int, delay_updates: int | None
) -> int:
    """The smallest H with which updates have that share of a round, in (0, 1); the inverse of `RoundForecast`, with
    seconds of one update of all the rank's workers. A delay of None is the longest: one less than H over the fragments.
    """
    transfer = transfer_seconds / update_seconds
    if delay_updates is None:  # of m updates for each fragment, m - 1 hide it
        return fragments * max(2, math.ceil(utilisation * (transfer / fragments + 1)))
    exposed = max(0.0, transfer - fragments * delay_updates)
    return max(fragments * (delay_updates + 1), math.ceil(exposed * utilisation / (1 - utilisation)))


FLOPS_PER_PARAMETER = 6
"""Of each token of an update: a multiplication and an addition forward, and twice as many back; attention's own
products are not counted."""


def computing_seconds(num_parameters: int, tokens: int, flops_per_second: float) -> float:
    """Time in which a device computes an update of so many tokens, whatever else it waits for."""
    return FLOPS_PER_PARAMETER * num_parameters * tokens / flops_per_second


GROWS_FROM = 0.1
"""Share of the sequences that is seen before a batch outgrows the first one; assumed (docs/theory.md)."""


def rounds_until(sequences: float, updates: int, first_batch: int, exponent: float) -> float:
    """Rounds of H `updates`, each with one average, until a trainer has taken so many sequences (docs/theory.md).

    Args:
        first_batch: total batch until `GROWS_FROM` of the sequences are seen.
        exponent: >= 0; from there on the batch grows as the sequences seen to this power. 0: not at all; 1: the
            squared gradient falls as one over the sequences, and the noise stays.
    """
    start, left = GROWS_FROM, 1 - exponent
    grown = math.log(1 / start) if left == 0 else (1 - start**left) / left
    return sequences / (updates * first_batch) * (start + start**exponent * grown)


HIDDEN_GRADIENTS = 2 / 3
"""Share of an update in which DistributedDataParallel's averages may travel: the backward pass."""


TRIPS = 2
"""Latencies that an exchange takes beside its bytes: gloo sends once the receiver has said that there is room. Measured
on two real hosts (docs/benchmarks.md)."""


def exchanges(format: WireFormat, num_ranks: int) -> int:
    """Exchanges of an average, each of which waits for the one before: around a ring in fp32, and else as
    averaging/sums.py has it, which needs torch."""
    if format is WireFormat.fp32:
        return num_ranks - 1
    return 2 if num_ranks > 2 else 1


def simulated(
    simulation: SimulationSettings, wire: WireSettings, plan: RoundPlan, reports: Sequence[RankReport]
) -> list[RankReport]:
    """The reports of a round as if every rank were a host of its own; evaluations and checkpoints take no time. Nobody
    waits for reports and plans, but for the slowest rank."""
    timed = [_without_waiting(simulation, wire, plan, report) for report in reports]
    spent = [_seconds(report) for report in timed]
    return [
        replace(report, control_seconds=max(spent) - seconds, checkpoint_seconds=0.0)
        for report, seconds in zip(timed, spent, strict=True)
    ]


def round_seconds(reports: Sequence[RankReport]) -> float:
    """The time of a round whose reports are simulated."""
    return max(report.control_seconds + _seconds(report) for report in reports)


def _seconds(report: RankReport) -> float:
    return sum(sum(part.seconds.values()) for part in report.trainers.values()) + report.merge.seconds


def _without_waiting(
    simulation: SimulationSettings, wire: WireSettings, plan: RoundPlan, report: RankReport
) -> RankReport:
    """What of a round was taken before the run was stopped in it counts, too: on this clock it takes no longer."""
    inner_seconds = {trainer: _inner_seconds(simulation, plan, report.rank, trainer) for trainer in report.trainers}
    turn = sum(inner_seconds.values()) / plan.updates  # one update of all workers, which compute while averages travel
    latency, delay = simulation.latency_seconds, plan.rhythm.delay_updates
    trainers: dict[int, TrainerReport] = {}
    for trainer, part in report.trainers.items():
        sent, seconds, transfer, computed = part.outer.bytes_sent, inner_seconds[trainer], 0.0, 0.0
        if sent:  # sketches travel beside the average, which waits for them on the link
            trips = wire.fragments * exchanges(wire.format, len(plan.layout.ranks(trainer))) * TRIPS
            if wire.is_delayed:  # what arrives left in the round before, for the most part
                sent = round(sent * over_signs(plan.arriving_four_bits_share) / over_signs(plan.rhythm.in_four_bits))
            transfer = trips * latency + simulation.transfer_seconds(sent + part.measure.bytes_sent)
            computed = simulation.average_seconds
        waited = RoundForecast(plan.updates, delay, transfer, wire.fragments).exposed_seconds(turn)
        gradients = simulation.transfer_seconds(part.outer.gradient_bytes_sent)
        passes = [
            Passes(seen.micro_batches, seen.sequences, seen.sequences * simulation.sequence_seconds * part.num_workers)
            for seen in part.inner.passes
        ]
        trainers[trainer] = replace(
            part,
            inner=replace(part.inner, seconds=seconds, passes=passes),
            measure=replace(part.measure, seconds=0.0),
            outer=dataclasses.replace(
                part.outer,
                seconds=computed + waited + max(0.0, gradients - HIDDEN_GRADIENTS * seconds),
                transfer_seconds=transfer if wire.is_delayed else 0.0,
                wait_seconds=waited if wire.is_delayed else 0.0,
            ),
            evaluation=EvaluationReport(part.evaluation.sums),
        )
    workers = sum(part.num_workers for part in report.trainers.values())
    merge = replace(report.merge, seconds=simulation.transfer_seconds(report.merge.bytes_sent))
    update_seconds = turn / workers if workers else 0.0
    return replace(report, trainers=trainers, merge=merge, update_seconds=update_seconds)


def _inner_seconds(simulation: SimulationSettings, plan: RoundPlan, rank: int, trainer: int) -> float:
    each = (simulation.update_seconds or 0.0) + plan.batches[trainer].local_batch * simulation.sequence_seconds
    return each * sum(plan.updates_of(trainer, worker) for worker in plan.layout.workers_on(rank, trainer))
