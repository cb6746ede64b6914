"""What rank 0 decides for a round, as a plain value that every rank receives (design: report and plan)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adloco_dist.config import Settings
from adloco_dist.decisions.batch import BatchPlan, BatchPremises, BatchReport, first_batch, next_batch
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.schedule import Progress


@dataclass(frozen=True)
class RoundPlan:
    """Everything a rank needs to run round `round`; the same on all ranks.

    Whatever came from a clock or from a rank's own state is written in here, so the plans replay the run.
    """

    round: int
    stop: str | None
    """Why training ends before this round; None: it goes on."""
    error: str | None
    """What went wrong, if the run must not continue; no model is saved then."""
    pool_tokens: int
    """Tokens that the whole pool has trained on before this round."""
    seconds: float
    """Rank 0's clock since the first round began."""
    layout: Layout
    batches: Mapping[int, BatchPlan]
    """By trainer."""
    updates: int
    """H; less in the last round of a budget in tokens, which ends with the update that spends it."""
    progress: Progress
    evaluate: bool
    """Whether anchors are evaluated at the end of this round."""

    def to_message(self) -> dict[str, Any]:
        """Plain JSON values; its keys are strings, as JSON wants them."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "RoundPlan":
        hosts = {int(trainer): tuple(ranks) for trainer, ranks in message["layout"]["hosts"].items()}
        batches = {int(trainer): BatchPlan.from_message(batch) for trainer, batch in message["batches"].items()}
        progress = Progress(**message["progress"])
        return cls(**{**message, "layout": Layout(hosts), "batches": batches, "progress": progress})

    def total_batch(self, trainer: int) -> int:
        """B_i = M_i b_i, in sequences."""
        return self.layout.num_workers(trainer) * self.batches[trainer].local_batch


@dataclass(frozen=True)
class Premises:
    """What is known before the first round. By trainer; a trainer that is missing has no such bound."""

    layout: Layout
    shard_sequences: Mapping[int, int] = field(default_factory=dict)
    batch_limits: Mapping[int, int | None] = field(default_factory=dict)
    trajectory: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Of replay: total batch of every round."""


@dataclass(frozen=True)
class PoolReport:
    """What rank 0 knows when it decides: every rank's report, reduced to what the decisions need."""

    stop_requested: bool = False
    seconds: float = 0.0
    differing_anchors: Sequence[str] = ()
    """One line for each trainer whose ranks do not hold the same anchor."""
    batches: Mapping[int, BatchReport] = field(default_factory=dict)


def plan_round(settings: Settings, premises: Premises, last: RoundPlan | None, report: PoolReport) -> RoundPlan:
    """The plan of the round after `last`, or of the first round."""
    layout = last.layout if last else premises.layout
    round_ = last.round + 1 if last else 0
    pool_tokens = last.pool_tokens + last.updates * last.progress.tokens_per_update if last else 0
    fraction = _fraction(settings, round_, pool_tokens, report.seconds)
    batches = {}
    for trainer in layout.trainers:
        known = _batch_premises(premises, layout, trainer)
        if last is None:
            batches[trainer] = first_batch(settings, known)
        else:
            measured = report.batches.get(trainer, BatchReport())
            batches[trainer] = next_batch(settings, known, last.batches[trainer], measured, round_, fraction)
    sequences_per_update = sum(layout.num_workers(trainer) * batch.local_batch for trainer, batch in batches.items())
    tokens_per_update = sequences_per_update * settings.data.sequence_length
    every = settings.evaluation.every_rounds
    return RoundPlan(
        round=round_,
        stop=_stop_reason(settings, round_, pool_tokens, report),
        error="; ".join(report.differing_anchors) or None,
        pool_tokens=pool_tokens,
        seconds=report.seconds,
        layout=layout,
        batches=batches,
        updates=_updates(settings, pool_tokens, tokens_per_update),
        progress=Progress(pool_tokens, tokens_per_update, fraction, _fraction_per_update(settings, tokens_per_update)),
        evaluate=every is not None and (round_ + 1) % every == 0,
    )


def _batch_premises(premises: Premises, layout: Layout, trainer: int) -> BatchPremises:
    return BatchPremises(
        layout.num_workers(trainer),
        premises.shard_sequences.get(trainer),
        premises.batch_limits.get(trainer),
        premises.trajectory.get(trainer, ()),
    )


def _stop_reason(settings: Settings, rounds: int, tokens: int, report: PoolReport) -> str | None:
    if report.differing_anchors:
        return "anchors differ"
    if report.stop_requested:
        return "interrupted"
    spent = {"rounds": rounds, "tokens": tokens, "seconds": report.seconds}
    for unit, limit in vars(settings.budget).items():
        if limit is not None and spent[unit] >= limit:
            return f"budget.{unit}={limit} reached"
    return None


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
