"""What rank 0 decides for a round, as a plain value that every rank receives (design: report and plan)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adloco_dist.config import Settings
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
    local_batches: dict[int, int]
    """b of every trainer, in sequences."""
    progress: Progress
    evaluate: bool
    """Whether anchors are evaluated at the end of this round."""

    def to_message(self) -> dict[str, Any]:
        """Plain JSON values; its keys are strings, as JSON wants them."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "RoundPlan":
        hosts = {int(trainer): tuple(ranks) for trainer, ranks in message["layout"]["hosts"].items()}
        batches = {int(trainer): batch for trainer, batch in message["local_batches"].items()}
        progress = Progress(**message["progress"])
        return cls(**{**message, "layout": Layout(hosts), "local_batches": batches, "progress": progress})

    def total_batch(self, trainer: int) -> int:
        """B_i = M_i b_i, in sequences."""
        return self.layout.num_workers(trainer) * self.local_batches[trainer]


@dataclass(frozen=True)
class PoolReport:
    """What rank 0 knows when it decides: every rank's report, reduced to what the decisions need."""

    stop_requested: bool = False
    seconds: float = 0.0
    differing_anchors: Sequence[str] = ()
    """One line for each trainer whose ranks do not hold the same anchor."""


def plan_round(settings: Settings, layout: Layout, last: RoundPlan | None, report: PoolReport) -> RoundPlan:
    """The plan of the round after `last`, or of the first round, which stands on the initial `layout`."""
    if last is None:
        batches = dict.fromkeys(layout.trainers, settings.batching.local_batch)
        return _plan(settings, 0, 0, report, layout, batches)
    pool_tokens = last.pool_tokens + settings.algorithm.updates_per_round * last.progress.tokens_per_update
    return _plan(settings, last.round + 1, pool_tokens, report, last.layout, last.local_batches)


def _plan(
    settings: Settings,
    round_: int,
    pool_tokens: int,
    report: PoolReport,
    layout: Layout,
    local_batches: dict[int, int],
) -> RoundPlan:
    sequences_per_update = sum(layout.num_workers(i) * local_batches[i] for i in layout.trainers)
    tokens_per_update = sequences_per_update * settings.data.sequence_length
    every = settings.evaluation.every_rounds
    return RoundPlan(
        round=round_,
        stop=_stop_reason(settings, round_, pool_tokens, report),
        error="; ".join(report.differing_anchors) or None,
        pool_tokens=pool_tokens,
        seconds=report.seconds,
        layout=layout,
        local_batches=local_batches,
        progress=_progress(settings, round_, pool_tokens, report.seconds, tokens_per_update),
        evaluate=every is not None and (round_ + 1) % every == 0,
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


def _progress(settings: Settings, round_: int, tokens: int, seconds: float, tokens_per_update: int) -> Progress:
    """Progress in the budget's own unit; a budget in seconds stands still within a round (no clock in between)."""
    budget = settings.budget
    if budget.rounds is not None:
        done = round_ / budget.rounds
        per_update = 1 / (budget.rounds * settings.algorithm.updates_per_round)
    elif budget.tokens is not None:
        done, per_update = tokens / budget.tokens, tokens_per_update / budget.tokens
    else:
        assert budget.seconds is not None
        done, per_update = seconds / budget.seconds, 0.0
    return Progress(tokens, tokens_per_update, done, per_update)
