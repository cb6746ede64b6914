"""How far a run has come: its position before a round, when it ends, and what is due by then."""

from collections.abc import Mapping
from dataclasses import dataclass

from adloco_dist.config import Amount, CheckpointSettings, EvaluationSettings, Settings
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, CheckpointId, PoolReport, RoundPlan

MAX_NONFINITE_ROUNDS = 10
"""Rounds in a row in which workers of a trainer may be left out as non-finite before the run stops."""


@dataclass(frozen=True)
class Position:
    """Where a run stands before a round."""

    rounds: int
    """Rounds that are complete."""
    tokens: int
    """Tokens that the whole pool has trained on."""
    seconds: float
    """Seconds of rank 0's clock since the first round began."""
    outer_steps: int
    """Outer steps that any trainers have taken."""
    nonfinite_rounds: Mapping[int, int]
    """Rounds in a row, up to the last, in which a worker was left out because it was not finite, by trainer."""

    def spent_fraction(self, budget: Amount) -> float:
        """The share of a budget that is spent."""
        spent = {"rounds": self.rounds, "tokens": self.tokens, "seconds": self.seconds}
        return spent[budget.unit] / budget.number


def position_after(last: RoundPlan | None, report: PoolReport) -> Position:
    """The position after the round of `last`; None: before the first round."""
    if last is None:
        return Position(0, 0, report.seconds, 0, {})
    return Position(
        rounds=last.round + 1,
        tokens=last.pool_tokens + last.round_tokens,
        seconds=report.seconds,
        outer_steps=last.outer_steps + len(set(last.layout.trainers) - report.unmoved),
        nonfinite_rounds={trainer: last.nonfinite_rounds.get(trainer, 0) + 1 for trainer in sorted(report.nonfinite)},
    )


def stop_reason(settings: Settings, position: Position, report: PoolReport) -> str | None:
    """Why training ends at this position; None: it continues."""
    if report.errors:
        return "the ranks disagree"
    if any(count >= MAX_NONFINITE_ROUNDS for count in position.nonfinite_rounds.values()):
        return NONFINITE
    if position.spent_fraction(settings.budget_amount) >= 1:
        has_trained = position.outer_steps or not position.rounds  # else the weights are still the initial ones
        return f"budget={settings.budget} reached" if has_trained else NONFINITE
    return INTERRUPTED if report.stop_requested else None


def fraction_per_update(budget: Amount, tokens_per_update: int, updates: int, update_seconds: float) -> float:
    """The share of the budget that one update spends.

    Args:
        updates: of the round.
        update_seconds: what an update of the last round took, averages and all; 0: not known.
    """
    if budget.unit == "rounds":
        return 1 / (budget.number * updates)
    return (tokens_per_update if budget.unit == "tokens" else update_seconds) / budget.number


def num_updates(budget: Amount, position: Position, tokens_per_update: int, updates: int) -> int:
    """H of the round: fewer in the last round of a budget in tokens, which a grown batch would overshoot otherwise.

    Args:
        updates: of other rounds.
    """
    if budget.unit != "tokens" or position.tokens >= budget.number:
        return updates
    return min(updates, -(-(int(budget.number) - position.tokens) // tokens_per_update))


def is_evaluation_due(settings: EvaluationSettings, round_: int, fraction: float, last_fraction: float) -> bool:
    """Whether anchors are evaluated at the end of a round.

    Args:
        round_: its number, from 1.
        fraction: share of the budget that is spent before it.
        last_fraction: the same before the last round.
    """
    interval = settings.interval
    if interval is None:
        return False
    if interval.unit == "rounds":
        return round_ % interval.number == 0
    share = interval.number / 100
    return fraction // share > last_fraction // share


def is_checkpoint_due(settings: CheckpointSettings, last: CheckpointId, now: CheckpointId) -> bool:
    """Whether the interval between two checkpoints has passed."""
    interval = settings.interval
    if interval is None:
        return False
    passed = {
        "rounds": now.rounds - last.rounds,
        "tokens": now.tokens - last.tokens,
        "minutes": (now.seconds - last.seconds) / 60,
    }
    return passed[interval.unit] >= interval.number
