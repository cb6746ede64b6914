"""Everything but tensors that decides how a run continues: what a checkpoint keeps beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NotRequired, TypedDict

from adloco_dist.config import Placement, WireSettings
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import place_again
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.report import MergeReport

STATE_VERSION = 4
"""It is raised whenever a field of the state is added, removed or means something else."""


class Totals(TypedDict):
    """What the rounds so far came to."""

    rounds: int
    tokens: int
    bytes_sent: int


class JournalState(TypedDict, total=False):
    """Where the records stand; without what a run of other sinks does not have."""

    metrics_bytes: int
    merges: list[dict[str, Any]]
    totals: Totals
    seconds: float
    started: str
    resumed: list[dict[str, Any]]
    tracking_id: str | None


class Phase(Enum):
    """Where in the loop a run resumes."""

    report = "report"
    """The point between two rounds: the ranks report, and rank 0 decides from the report that was saved."""
    inner = "inner"
    """The middle of a round's inner phase: the workers take the updates that are left."""


@dataclass(frozen=True)
class RunState:
    """A run between two rounds, or in the middle of one."""

    settings: Mapping[str, Any]
    """Plain values of the settings, by dotted key."""
    corpus: str
    """Digest of the corpus."""
    world_size: int
    """Ranks, or seats of several."""
    plan: RoundPlan
    """Plan of the last round that was begun."""
    pool: PoolReport | None
    """What the next plan is decided from; None in the middle of the round."""
    merge: MergeReport
    """In the middle of a round, what merges before it came to, of all ranks: it is recorded when the round ends."""
    seconds: float
    """Rank 0's clock since the first round began, earlier starts included."""
    shards: Mapping[int, dict[str, Any]]
    """The state of every trainer's cursor into the data."""
    journal: Mapping[str, Any]
    """Where the records stand: a `JournalState`."""

    @property
    def ranks_per_worker(self) -> int:
        """Ranks that held a worker together.

        Raises:
            ValueError: there is no such number in the settings.
        """
        size = self.settings.get("pool.ranks_per_worker", 1)
        if type(size) is not int or size < 1:
            raise ValueError(f"settings: pool.ranks_per_worker={size!r} is no number of ranks")
        return size

    @property
    def phase(self) -> Phase:
        """Where the loop is entered."""
        return Phase.inner if self.pool is None else Phase.report

    @property
    def wire(self) -> WireSettings:
        """How pseudo-gradients travelled.

        Raises:
            ValueError: the settings do not say it.
        """
        section = {key: value for key, value in self.settings.items() if key.startswith("wire.")}
        return decode(WireSettings, {key.removeprefix("wire."): value for key, value in section.items()})

    @property
    def has_weights(self) -> bool:
        """Whether workers did not stand at their anchors, and their own weights were kept."""
        return self.phase is Phase.inner or self.wire.is_streaming

    def to_message(self) -> dict[str, Any]:
        """The state as plain JSON values, with the version that reads them."""
        return {"version": STATE_VERSION, **encode(self)}

    @classmethod
    def from_message(cls, message: Any) -> "RunState":
        """The state in a message that anybody may have written.

        Raises:
            ValueError: it holds no state, or one of another version.
        """
        version = decode(_Versioned, message).get("version")
        if version != STATE_VERSION:
            raise ValueError(f"version {version}; this release reads version {STATE_VERSION}")
        state = decode(cls, message)
        decode(JournalState, state.journal)
        _ = state.wire, state.ranks_per_worker
        workers = state.plan.layout.workers
        spans = [ranks for of_trainer in workers.values() for ranks in of_trainer]
        is_empty = not (spans and all(spans) and all(workers.values()))
        if is_empty or not all(0 <= rank < state.world_size for ranks in spans for rank in ranks):
            raise ValueError(f"plan.layout: does not fit {state.world_size} ranks")
        if state.pool and len(state.pool.capacities) not in (0, state.world_size):
            raise ValueError(f"pool.capacities: is not of {state.world_size} ranks")
        for name, members in (("plan.batches", state.plan.batches), ("shards", state.shards)):
            if members.keys() != workers.keys():
                raise ValueError(f"{name}: is of other trainers than the plan's layout")
        return state

    def placed_on(self, nodes: Sequence[int], placement: Placement, is_same: bool) -> "RunState":
        """The same run on these ranks: on as many as before nothing changes, on others workers are placed again.

        Args:
            nodes: the node of each rank, or seat.
            is_same: whether there are as many ranks as before, and as many hold a worker together.
        """
        if is_same:
            return self
        layout = self.plan.layout
        if len(nodes) != self.world_size:
            layout = place_again(layout, nodes, placement)
        plan = replace(self.plan, layout=layout, probed=())
        return replace(
            self,
            world_size=len(nodes),
            plan=plan,
            pool=self.pool and replace(self.pool, capacities=(), update_seconds=()),
        )

    def capacity(self, rank: int) -> int | None:
        """Sequences that the rank's device took in one micro-batch; None: any number, or unknown."""
        return self.pool.capacities[rank] if self.pool and self.pool.capacities else None


class _Versioned(TypedDict):
    version: NotRequired[Any]
