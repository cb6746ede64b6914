"""Everything but tensors that decides how a run goes on: what a checkpoint keeps beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from adloco_dist.config import Placement
from adloco_dist.decisions.layout import host_anew
from adloco_dist.decisions.plan import PoolReport, RoundPlan
from adloco_dist.decisions.typed import NOT_UNDERSTOOD, check


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


@dataclass(frozen=True)
class RunState:
    """A run between two rounds, or in the middle of one."""

    settings: Mapping[str, Any]
    """By dotted key, plain."""
    corpus: str
    """Its digest."""
    world_size: int
    plan: RoundPlan
    """Of the last round that was begun."""
    pool: PoolReport | None
    """What the next plan is decided from; None in the middle of the round."""
    seconds: float
    """Rank 0's clock since the first round began, earlier starts included."""
    shards: Mapping[int, dict[str, Any]]
    """How every trainer's shard came about, and where it stands."""
    journal: Mapping[str, Any]
    """Where the records stand: a `JournalState`."""

    def to_message(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "plan": self.plan.to_message(), "pool": self.pool and self.pool.to_message()}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "RunState":
        decoded = {
            "plan": RoundPlan.from_message(message["plan"]),
            "pool": message["pool"] and PoolReport.from_message(message["pool"]),
            "shards": {int(trainer): state for trainer, state in message["shards"].items()},
        }
        return cls(**{**message, **decoded})

    @classmethod
    def understood(cls, message: Any) -> "RunState":
        """As `from_message`, of a message that anybody may have written.

        Raises:
            ValueError: it is no state, or one of another version.
        """
        try:
            state = cls.from_message(message)
        except NOT_UNDERSTOOD as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        check(state, cls)
        check(state.journal, JournalState, "journal")
        hosts = state.plan.layout.hosts
        ranks = [rank for workers in hosts.values() for rank in workers]
        if not (all(hosts.values()) and ranks and 0 <= min(ranks) <= max(ranks) < state.world_size):
            raise ValueError(f"plan.layout: does not fit {state.world_size} ranks")
        if state.pool and len(state.pool.capacities) not in (0, state.world_size):
            raise ValueError(f"pool.capacities: is not of {state.world_size} ranks")
        for name, members in (("plan.batches", state.plan.batches), ("shards", state.shards)):
            if members.keys() != hosts.keys():
                raise ValueError(f"{name}: is of other trainers than the plan's layout")
        for trainer, shard in state.shards.items():
            _check_shard(shard, f"shards.{trainer}")
        return state

    def hosted_on(self, nodes: Sequence[int], placement: Placement) -> "RunState":
        """The same run on these ranks: on as many as before nothing changes, on others workers are hosted anew.

        Args:
            nodes: the node of each rank, one entry per rank.
        """
        if len(nodes) == self.world_size:
            return self
        plan = replace(self.plan, layout=host_anew(self.plan.layout, nodes, placement), probed=())
        return replace(self, world_size=len(nodes), plan=plan, pool=self.pool and replace(self.pool, capacities=()))

    def capacity(self, rank: int) -> int | None:
        """What the rank's device took in one pass; None: anything, or unknown."""
        return self.pool.capacities[rank] if self.pool and self.pool.capacities else None


def _check_shard(state: Any, name: str) -> None:
    """Of rows in any order, with what it was united from; or of streams.

    Raises:
        ValueError: it is neither.
    """
    check(state, _Streams if isinstance(state, dict) and "streams" in state else _Rows, name)
    for place, member in enumerate(state.get("members", ())):
        _check_shard(member, f"{name}.members.{place}")


class _Rows(TypedDict):
    trainer: int
    cursor: int
    members: list[dict[str, Any]]


class _Streams(TypedDict):
    trainer: int
    streams: list[dict[str, Any]]
