"""What rank 0 decides for a round, as a plain value that every rank receives (design: report and plan)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adloco_dist.decisions.batch import BatchPlan, BatchReport
from adloco_dist.decisions.checkpointing import Mark
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.regrouping import Regrouping
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.decisions.schedule import Progress

INTERRUPTED = "interrupted"
"""Why a run stops that was asked to, before its budget was spent."""
SPOILT = "workers were not finite"
"""Why a run stops that comes to nothing: in too many rounds in a row, workers of a trainer were left out, or the budget
is spent and no trainer has taken an outer step."""


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
    regrouping: Regrouping | None
    """What is merged and regrouped before the round."""
    probed: tuple[int, ...]
    """The ranks of which something changes by that: they find out anew what their devices take."""
    layout: Layout
    """After that."""
    shard_sequences: Mapping[int, int]
    """By trainer, after that."""
    batches: Mapping[int, BatchPlan]
    """By trainer."""
    updates: int
    """H; less in the last round of a budget in tokens, which ends with the update that spends it."""
    progress: Progress
    evaluate: bool
    """Whether anchors are evaluated at the end of this round."""
    is_concurrent: bool
    """Whether the instances of a rank have their turns at once."""
    checkpoint: bool
    """Whether the state before this round is written."""
    last_checkpoint: Mark
    """The newest that was planned, this one included."""
    spoilt_rounds: Mapping[int, int]
    """By trainer: rounds in a row, up to this one, in which a worker was left out because it was not finite."""
    outer_steps: int = 0
    """That any trainers have taken before this round: a step needs a worker that is finite."""

    def to_message(self) -> dict[str, Any]:
        """Plain JSON values. Shallow where it can be: `asdict` would copy thousands of workers one by one."""
        told = self.regrouping
        return {
            **vars(self),
            "regrouping": told and {"merges": [asdict(merge) for merge in told.merges], "origins": told.origins},
            "layout": vars(self.layout),
            "batches": {trainer: batch.to_message() for trainer, batch in self.batches.items()},
            "progress": vars(self.progress),
            "last_checkpoint": vars(self.last_checkpoint),
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "RoundPlan":
        hosts = {int(trainer): tuple(ranks) for trainer, ranks in message["layout"]["hosts"].items()}
        decoded = {
            "regrouping": message["regrouping"] and Regrouping.from_message(message["regrouping"]),
            "probed": tuple(message["probed"]),
            "layout": Layout(hosts),
            "shard_sequences": {int(trainer): size for trainer, size in message["shard_sequences"].items()},
            "batches": {int(id): BatchPlan.from_message(batch) for id, batch in message["batches"].items()},
            "progress": Progress(**message["progress"]),
            "last_checkpoint": Mark(**message["last_checkpoint"]),
            "spoilt_rounds": {int(trainer): count for trainer, count in message["spoilt_rounds"].items()},
            "outer_steps": message.get("outer_steps", message["round"]),  # older checkpoints did not count them
        }
        return cls(**{**message, **decoded})

    def digest(self) -> str:
        """Tells whether two ranks act on the same plan."""
        return hashlib.sha256(json.dumps(self.to_message(), sort_keys=True).encode()).hexdigest()[:16]

    def spoilt_in_words(self) -> str:
        """Which trainers had workers that were not finite, and for how long."""
        told = [f"trainer {id} in {count} rounds in a row" for id, count in self.spoilt_rounds.items()]
        if not self.outer_steps:
            told.append(f"no outer step was taken in {self.round} rounds")
        return f"workers were not finite: {', '.join(told)}; lower inner.lr, or look at the data"

    def total_batch(self, trainer: int) -> int:
        """B_i = M_i b_i, in sequences."""
        return self.layout.num_workers(trainer) * self.batches[trainer].local_batch


@dataclass(frozen=True)
class Premises:
    """What is known before the first round. By trainer; a trainer that is missing has no such bound."""

    layout: Layout
    shard_sequences: Mapping[int, int] = field(default_factory=dict)
    batch_limits: Mapping[int, int | None] = field(default_factory=dict)
    trajectory: Trajectory = field(default_factory=Trajectory)
    """Of replay."""
    is_concurrent: bool = False
    """Whether the instances of a rank have their turns at once."""


@dataclass(frozen=True)
class PoolReport:
    """What rank 0 knows when it decides: every rank's report, reduced to what the decisions need."""

    stop_requested: bool = False
    seconds: float = 0.0
    errors: Sequence[str] = ()
    """One line for each trainer whose ranks do not hold the same anchor, and for ranks that act on another plan."""
    batches: Mapping[int, BatchReport] = field(default_factory=dict)
    not_finite: frozenset[int] = frozenset()
    """Trainers whose anchor is not finite."""
    spoilt: frozenset[int] = frozenset()
    """Trainers of which a worker was left out of the outer step."""
    unmoved: frozenset[int] = frozenset()
    """Trainers that took no outer step, for none of their workers was finite."""
    capacities: Sequence[int | None] = ()
    """Sequences that every rank's device takes in one pass; None: any number."""
    is_writing: bool = False
    """Whether a rank has not finished the last checkpoint."""

    def to_message(self) -> dict[str, Any]:
        """Plain JSON values."""
        batches = {id: asdict(batch) for id, batch in self.batches.items()}
        sets = {name: sorted(getattr(self, name)) for name in ("not_finite", "spoilt", "unmoved")}
        return {**vars(self), "batches": batches, **sets}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "PoolReport":
        decoded = {
            "batches": {int(id): BatchReport.from_message(batch) for id, batch in message["batches"].items()},
            "not_finite": frozenset(message["not_finite"]),
            "spoilt": frozenset(message["spoilt"]),
            "unmoved": frozenset(message.get("unmoved", ())),
        }
        return cls(**{**message, **decoded})
