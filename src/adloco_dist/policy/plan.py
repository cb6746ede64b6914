"""What rank 0 decides for a round, as a plain value that every rank receives (docs/architecture.md, "A round")."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adloco_dist.averaging.schedule import Action, Event
from adloco_dist.messages import encode
from adloco_dist.policy.batch import BatchPlan, BatchReport
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.link import Rhythm, RoundCost
from adloco_dist.policy.merging import Merge, Network
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.schedule import Progress

INTERRUPTED = "interrupted"
"""Why a run stops that was asked to, before its budget was spent."""
REPLAYED = "all plans of the run in run.replay were repeated"
"""Why a run stops that repeats one which was stopped."""
NONFINITE = "workers were not finite"
"""Why a run stops that comes to nothing: in too many rounds in a row, workers of a trainer were left out, or the budget
is spent and no trainer has taken an outer step."""


@dataclass(frozen=True)
class CheckpointId:
    """A point in a run: where it stood when a checkpoint was planned."""

    number: int = 0
    """Number of the checkpoint, counted over all starts of the run; 0: none yet."""
    rounds: int = 0
    """Rounds that were complete."""
    tokens: int = 0
    """Tokens that the whole pool had trained on."""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The directory of the checkpoint."""
        return f"{self.number:06d}-round-{self.rounds}"

    def since(self, earlier: "CheckpointId", unit: str) -> float:
        """How many rounds, tokens, seconds or minutes have passed since an earlier point."""
        if unit == "minutes":
            return (self.seconds - earlier.seconds) / 60
        return getattr(self, unit) - getattr(earlier, unit)


@dataclass(frozen=True)
class RoundPlan:
    """Everything a rank needs to run round `round`; the same on all ranks.

    Whatever came from a clock or from a rank's own state is written in here, so the plans replay the run.
    """

    round: int
    stop: str | None
    """Why training ends before this round; None: it continues."""
    error: str | None
    """What went wrong, if the run must not continue; no model is saved then."""
    pool_tokens: int
    """Tokens that the whole pool has trained on before this round."""
    seconds: float
    """When the round begins by rank 0's clock, since the first one began: the last one's end is foreseen."""
    merge: Merge | None
    """The trainers that become one before the round."""
    probed: tuple[int, ...]
    """The ranks of a trainer that a merge changes: they probe again what their devices take."""
    layout: Layout
    """The layout after the merge."""
    shard_sequences: Mapping[int, int]
    """Sequences of the shards after the merge, by trainer."""
    batches: Mapping[int, BatchPlan]
    """Batches of the round, by trainer."""
    measures: bool
    """Whether gradients are compared in the first updates of the round."""
    updates_since_measured: int
    """Updates since the last round that did, before this one."""
    rhythm: Rhythm
    """How the averages of the round are spread in time."""
    updates: int
    """H; fewer in the last round of a budget in tokens, which ends with the update that spends it."""
    events: tuple[Event, ...]
    """What happens after which update: the round, as data."""
    progress: Progress
    evaluate: bool
    """Whether anchors are evaluated at the end of this round."""
    is_concurrent: bool
    """Whether the instances of a rank compute concurrently."""
    checkpoint: bool
    """Whether the state before this round is written."""
    last_checkpoint: CheckpointId
    """The newest checkpoint that was planned, this round's included."""
    nonfinite_rounds: Mapping[int, int]
    """Rounds in a row, up to the last that is known of, in which a worker was left out because it was not finite, by
    trainer."""
    outer_steps: int
    """Outer steps of any trainers that are known of: a step needs a worker that is finite."""

    was_in_four_bits: bool = False
    """Whether the averages of the round before, whose last arrives in this one, take 4 bits of each element."""
    costs: tuple[RoundCost, ...] = ()
    """What the last rounds cost beside their updates, with algorithm.round=link."""
    worker_updates: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Updates of each worker, by trainer, where ranks differ in speed; a trainer that is missing takes `updates`."""
    owed_updates: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Parts of updates that those workers could have taken beside them; they count in the next round."""
    leaving: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Workers, by trainer, whose ranks are lost, and that end with the round."""

    @property
    def remaining(self) -> "Layout":
        """The layout without the workers that end with the round."""
        return self.layout.without(self.leaving)

    def updates_of_workers(self, trainer: int) -> tuple[int, ...]:
        """Updates that each of a trainer's workers takes in the round."""
        return self.worker_updates.get(trainer, (self.updates,) * self.layout.num_workers(trainer))

    def updates_of(self, trainer: int, worker: int) -> int:
        """Updates that a worker takes in the round."""
        return self.updates_of_workers(trainer)[worker]

    @property
    def arriving_four_bits_share(self) -> float:
        """Share of the averages that arrive in the round in which 4 bits of each element travel: the first fragment's
        left in the round before."""
        fragments = [event.fragment for event in self.events if event.action is Action.mix]
        in_four_bits = [self.rhythm.in_four_bits if fragment else self.was_in_four_bits for fragment in fragments]
        return sum(in_four_bits) / len(in_four_bits) if in_four_bits else 0.0

    def updates_by(self, update: int, trainer: int, worker: int) -> int:
        """Updates that a worker has taken when those that take `updates` have taken `update` of them. It is rounded up:
        a slow worker computes while an average travels, too."""
        return -(-update * self.updates_of(trainer, worker) // self.updates)

    def updates_before(self, event: int, trainer: int, worker: int) -> int:
        """Updates that a worker has taken when the round stands before an event, as in `Standing`."""
        return self.updates_by(self.events[event].update if event < len(self.events) else self.updates, trainer, worker)

    def sequences(self, trainer: int) -> int:
        """Sequences that a trainer takes in the round."""
        return self.batches[trainer].local_batch * sum(self.updates_of_workers(trainer))

    @property
    def round_tokens(self) -> int:
        """Tokens that the pool trains on in the round."""
        in_update = sum(self.total_batch(trainer) for trainer in self.layout.trainers)
        tokens_per_sequence = self.progress.tokens_per_update // in_update
        return tokens_per_sequence * sum(self.sequences(trainer) for trainer in self.layout.trainers)

    @property
    def needs_newest_anchors(self) -> bool:
        """Whether averages under way are waited for before the round: it merges or saves anchors, or they are
        the last."""
        return bool(self.stop or self.merge or self.checkpoint)

    def digest(self) -> str:
        """A digest that differs where two ranks act on different plans."""
        return hashlib.sha256(json.dumps(encode(self), sort_keys=True).encode()).hexdigest()[:16]

    def nonfinite_in_words(self) -> str:
        """Which trainers had workers that were not finite, and for how long."""
        detail = [f"trainer {trainer} in {count} rounds in a row" for trainer, count in self.nonfinite_rounds.items()]
        if not self.outer_steps:
            detail.append(f"no outer step was taken in {self.round} rounds")
        return f"workers were not finite: {', '.join(detail)}; lower inner.lr, or look at the data"

    def total_batch(self, trainer: int) -> int:
        """B_i = M_i b_i, in sequences."""
        return self.layout.num_workers(trainer) * self.batches[trainer].local_batch


@dataclass(frozen=True)
class PlanInputs:
    """What is known before the first round. By trainer; a trainer that is missing has no such bound."""

    layout: Layout
    shard_sequences: Mapping[int, int] = field(default_factory=dict)
    batch_limits: Mapping[int, int | None] = field(default_factory=dict)
    trajectory: Trajectory = field(default_factory=Trajectory)
    """The run that batching.request=replay repeats."""
    network: Network = field(default_factory=Network)
    is_concurrent: bool = False
    plans: Sequence[RoundPlan] = ()
    """The plans of a run that is repeated (run.replay), on rank 0; none: rank 0 decides."""


@dataclass(frozen=True)
class PoolReport:
    """What rank 0 knows of a round when it decides a later one: every rank's report, reduced to what the decisions
    need. Sequences have a value of each rank (`RankReport`), in their order."""

    seconds: float = 0.0
    """Rank 0's clock at the end of the round, since the first one began."""
    round_seconds: float = 0.0
    """What the round took of them."""
    updates: int = 0
    """Updates of the round; 0: it is the state before training."""
    probed: Sequence[int] = ()
    """The ranks that have probed, before the round, what their devices take."""
    errors: Sequence[str] = ()
    """One line for each trainer whose ranks do not hold the same anchor, and for ranks that act on another plan."""
    batches: Mapping[int, BatchReport] = field(default_factory=dict)
    train_loss: Mapping[int, float] = field(default_factory=dict)
    """Mean loss of a trainer's workers in the round, in nats per target, by trainer."""
    validation_loss: Mapping[int, float] = field(default_factory=dict)
    """Loss of the anchors that were evaluated at the end of the round, in nats per target, by trainer."""
    not_finite: frozenset[int] = frozenset()
    """Trainers whose anchor is not finite."""
    nonfinite: frozenset[int] = frozenset()
    """Trainers of which a worker was left out of the outer step."""
    outer_steps: int = 0
    """Trainers that took an outer step: a worker of them was finite."""
    capacities: Sequence[int | None] = ()
    cost: RoundCost | None = None
    """What the round cost beside its updates; None: it was not measured as a whole."""
    is_writing: bool = False
    """Whether a rank has not finished the last checkpoint."""
