"""Everything but tensors that decides how a run goes on: what a checkpoint keeps beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adloco_dist.config import Placement
from adloco_dist.decisions.layout import host_anew
from adloco_dist.decisions.plan import PoolReport, RoundPlan


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
    """Where the records stand."""

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
