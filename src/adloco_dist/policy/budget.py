"""How far a run has come before a round, when it ends, and what is due by then."""

import math
from collections.abc import Mapping

from adloco_dist.config import Amount, CheckpointSettings, EvaluationSettings, Settings
from adloco_dist.policy.plan import NONFINITE, CheckpointId, PoolReport, RoundPlan

MAX_NONFINITE_ROUNDS = 10
"""Rounds in a row in which workers of a trainer may be left out as non-finite before the run stops."""


def point_after(last: RoundPlan | None, seconds: float) -> CheckpointId:
    """The point that a run has reached after the round of `last` (None: before the first), with the number of the next
    checkpoint. `seconds` are of rank 0's clock since the first round began."""
    if last is None:
        return CheckpointId(seconds=seconds)
    number, tokens = last.last_checkpoint.number + 1, last.pool_tokens + last.round_tokens
    return CheckpointId(number, last.round + 1, tokens, seconds)


def begin_seconds(last: RoundPlan | None, report: PoolReport) -> float:
    """When the round after `last` begins, by rank 0's clock: `last` is still under way, and is taken to have updates as
    long as those of the round before it, which `report` is about."""
    if last is None:
        return report.seconds
    if not report.updates:
        return last.seconds
    return max(last.seconds, report.seconds + report.round_seconds * last.updates / report.updates)


def spent_fraction(budget: Amount, now: CheckpointId) -> float:
    """The share of a budget that is spent."""
    return now.since(CheckpointId(), budget.unit) / budget.number


def stop_reason(
    settings: Settings, now: CheckpointId, outer_steps: int, nonfinite_rounds: Mapping[int, int], report: PoolReport
) -> str | None:
    """Why training ends at this point; None: it continues."""
    if report.errors:
        return "the ranks disagree"
    if any(count >= MAX_NONFINITE_ROUNDS for count in nonfinite_rounds.values()):
        return NONFINITE
    if spent_fraction(settings.budget_amount, now) >= 1:
        has_trained = outer_steps or now.rounds < 2  # of which nothing is known; else the weights are the initial ones
        return f"budget={settings.budget} reached" if has_trained else NONFINITE
    return None


def fraction_per_update(budget: Amount, tokens_per_update: float, updates: int, update_seconds: float) -> float:
    """The share of the budget that one update of a round of `updates` spends. `update_seconds` is what an update of the
    last round took, averages and all; 0: not known."""
    if budget.unit == "rounds":
        return 1 / (budget.number * updates)
    return (tokens_per_update if budget.unit == "tokens" else update_seconds) / budget.number


def num_updates(budget: Amount, now: CheckpointId, tokens_per_update: float, updates: int) -> int:
    """H of the round: `updates`, or fewer in the last round of a budget in tokens, which a grown batch would overshoot
    otherwise."""
    if budget.unit != "tokens" or now.tokens >= budget.number:
        return updates
    return min(updates, math.ceil((budget.number - now.tokens) / tokens_per_update))


def is_evaluation_due(settings: EvaluationSettings, round_: int, fraction: float, last_fraction: float) -> bool:
    """Whether anchors are evaluated at the end of round `round_`, counted from 1. The fractions are the shares of the
    budget that are spent before this round and before the last."""
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
    return interval is not None and now.since(last, interval.unit) >= interval.number
