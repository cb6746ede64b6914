"""Everything that decides how a run continues, except tensors: what a checkpoint keeps beside them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypedDict

from adloco_dist.checkpoint.files import part_suffixes, trainer_file, worker_file
from adloco_dist.config import Placement
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import fitted, place_again
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.report import MergeReport
from adloco_dist.schema import Entry

HeldBy = Callable[[int, int], Collection[int]]
Origins = Mapping[int, Sequence[int | None]]
STATE_VERSION = 8
"""It is raised whenever a field of the state is added, removed or means something else."""


class OtherVersionError(ValueError):
    """Another release wrote the state; half a line that says which."""


@dataclass(frozen=True)
class Schema:
    """What the files of tensors hold."""

    trainer: tuple[Entry, ...]
    """Of a trainer's file: what its ranks share."""
    worker: tuple[Entry, ...]
    """Of a worker's file; what a rank keeps of a trainer for itself is in the file of its first worker."""

    @property
    def is_away(self) -> bool:
        """Whether workers did not stand at their anchors, and their own weights were kept."""
        return any(entry.is_progress for entry in self.worker)


class JournalState(TypedDict, total=False):
    """What the sinks of the records need to continue; those that a run does not have keep nothing."""

    metrics_bytes: int
    merges: list[dict[str, Any]]
    totals: dict[str, int]
    seconds: float
    started: str
    hosts: list[str]
    resumed: list[dict[str, Any]]
    tracking_id: str | None


@dataclass(frozen=True)
class RunState:
    """A run in a round that has begun, of which updates may have been taken or not."""

    settings: Mapping[str, Any]
    """Plain values of the settings, by dotted key."""
    schema: Schema
    corpus: str
    """Digest of the corpus."""
    world_size: int
    """Ranks, or seats of several."""
    plan: RoundPlan
    """Plan of the round."""
    next_event: int
    """The event of the plan at which the round goes on, or its end, as in `Standing`; workers first take the updates
    that are left before it."""
    has_begun: bool
    """Whether updates of the round may have been taken."""
    merge: MergeReport
    """What the merges before the round came to, of all ranks; recorded when the round ends."""
    pool: PoolReport | None
    """What the next plan is decided from; None: nothing, for the round is the first."""
    seconds: float
    """Rank 0's clock since the first round began, earlier starts included."""
    shards: Mapping[int, dict[str, Any]]
    """The state of every trainer's cursor into the data."""
    journal: Mapping[str, Any]
    """Where the records stand: a `JournalState`."""

    @property
    def ranks_per_worker(self) -> int:
        """Ranks that held a worker together; ValueError where the settings have no such number."""
        size = self.settings.get("pool.ranks_per_worker", 1)
        if type(size) is not int or size < 1:
            raise ValueError(f"settings: pool.ranks_per_worker={size!r} is no number of ranks")
        return size

    def entries_by_file(self) -> dict[str, tuple[Entry, ...]]:
        """The files of tensors that the checkpoint must have, and what each holds."""
        entries: dict[str, tuple[Entry, ...]] = {}
        layout = self.plan.layout
        for trainer, suffix in product(layout.trainers, part_suffixes(self.ranks_per_worker)):
            entries[trainer_file(trainer, suffix)] = self.schema.trainer
            for worker in range(layout.num_workers(trainer)):
                entries[worker_file(trainer, worker, suffix)] = self.schema.worker
        return entries

    def to_message(self) -> dict[str, Any]:
        """The state as plain JSON values, with the version of what they mean."""
        return {"version": STATE_VERSION, **encode(self)}

    @classmethod
    def from_message(cls, message: Any) -> "RunState":
        """The state in a message that anybody may have written.

        Raises:
            ValueError: it is no state.
            OtherVersionError: it is the state of another version.
        """
        version = message.get("version") if isinstance(message, dict) else None
        if version != STATE_VERSION:
            raise OtherVersionError(f"is of version {version}; this release reads version {STATE_VERSION}")
        state = decode(cls, message)
        decode(JournalState, state.journal)
        _ = state.ranks_per_worker
        workers = state.plan.layout.workers
        spans = [ranks for of_trainer in workers.values() for ranks in of_trainer]
        is_empty = not (spans and all(spans) and all(workers.values()))
        if is_empty or not all(0 <= rank < state.world_size for ranks in spans for rank in ranks):
            raise ValueError(f"plan.layout: does not fit {state.world_size} ranks")
        if not 0 <= state.next_event <= len(state.plan.events) + 1:
            raise ValueError(f"next_event: the plan has no event {state.next_event}")
        for name, members in (("plan.batches", state.plan.batches), ("shards", state.shards)):
            if members.keys() != workers.keys():
                raise ValueError(f"{name}: is of other trainers than the plan's layout")
        return state

    def fitted(self, num_ranks: int, held_by: HeldBy) -> tuple["RunState", Origins]:
        """The same run before the first update of a round, with as many workers as there are ranks, or seats; and which
        worker each was, as `policy.layout.fitted` has it."""
        layout, origins = fitted(self.plan.layout, num_ranks, held_by)
        progress, before = self.plan.progress, sum(map(self.plan.total_batch, self.plan.layout.trainers))
        plan = replace(self.plan, layout=layout, worker_updates={}, owed_updates={})
        tokens = progress.tokens_per_update // before * sum(map(plan.total_batch, layout.trainers))
        plan = replace(plan, progress=replace(progress, tokens_per_update=tokens))
        return replace(self, world_size=num_ranks, plan=plan), origins

    def placed_on(self, nodes: Sequence[int], placement: Placement, is_same: bool) -> "RunState":
        """The same run on these ranks: workers are placed again unless there are as many ranks as before.

        Args:
            nodes: the node of each rank, or seat.
            is_same: whether there are as many ranks as before, and as many hold a worker together.
        """
        if is_same:
            return self
        layout = self.plan.layout
        if len(nodes) != self.world_size:
            layout = place_again(layout, nodes, placement)
        costs = tuple(replace(cost, turn_seconds=()) for cost in self.plan.costs)
        plan, pool = replace(self.plan, layout=layout, probed=(), costs=costs), self.pool
        if pool:
            pool = replace(pool, capacities=(), cost=pool.cost and replace(pool.cost, turn_seconds=()))
        return replace(self, world_size=len(nodes), plan=plan, pool=pool)
