"""How far a run has come: its position before a round, the share of its budget that is spent, and when it ends."""

from collections.abc import Mapping
from dataclasses import dataclass

from adloco_dist.config import Settings
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, PoolReport, RoundPlan


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


def position_after(last: RoundPlan | None, report: PoolReport) -> Position:
    """The position after the round of `last`; None: before the first round."""
    if last is None:
        return Position(0, 0, report.seconds, 0, {})
    return Position(
        rounds=last.round + 1,
        tokens=last.pool_tokens + last.round_tokens,
        seconds=report.seconds,
        outer_steps=last.outer_steps + len(set(last.layout.trainers) - report.unmoved),
        nonfinite_rounds={
            trainer: last.nonfinite_rounds.get(trainer, 0) + 1 for trainer in sorted(report.nonfinite)
        },
    )  # fmt: skip


def stop_reason(settings: Settings, position: Position, report: PoolReport) -> str | None:
    """Why training ends at this position; None: it continues."""
    if report.errors:
        return "the ranks disagree"
    if any(count >= settings.outer.nonfinite_rounds for count in position.nonfinite_rounds.values()):
        return NONFINITE
    spent = {"rounds": position.rounds, "tokens": position.tokens, "seconds": position.seconds}
    for unit, limit in vars(settings.budget).items():
        if limit is not None and spent[unit] >= limit:
            has_trained = position.outer_steps or not position.rounds  # else the weights are still the initial ones
            return f"budget.{unit}={limit} reached" if has_trained else NONFINITE
    return INTERRUPTED if report.stop_requested else None


def spent_fraction(settings: Settings, position: Position) -> float:
    """The share of the budget that is spent, in the budget's own unit."""
    budget = settings.budget
    if budget.rounds is not None:
        return position.rounds / budget.rounds
    if budget.tokens is not None:
        return position.tokens / budget.tokens
    assert budget.seconds is not None
    return position.seconds / budget.seconds


def seconds_per_update(last: RoundPlan | None, position: Position) -> float:
    """What an update of the last round took on rank 0's clock, averages and all; 0: there was none."""
    return max(0.0, position.seconds - last.seconds) / last.updates if last else 0.0


def fraction_per_update(settings: Settings, tokens_per_update: int, updates: int, update_seconds: float) -> float:
    """The share of the budget that one update spends.

    Args:
        updates: of the round.
        update_seconds: what an update of the last round took of a budget in seconds, averages and all; 0: not known.
    """
    budget = settings.budget
    if budget.rounds is not None:
        return 1 / (budget.rounds * updates)
    if budget.tokens is not None:
        return tokens_per_update / budget.tokens
    assert budget.seconds is not None
    return update_seconds / budget.seconds


def num_updates(settings: Settings, position: Position, tokens_per_update: int, updates: int) -> int:
    """H of the round: fewer in the last round of a budget in tokens, which a grown batch would overshoot otherwise.

    Args:
        updates: of other rounds.
    """
    budget = settings.budget.tokens
    if budget is None or position.tokens >= budget:
        return updates
    return min(updates, -(-(budget - position.tokens) // tokens_per_update))
