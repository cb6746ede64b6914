"""What policies decide from: the one view of a trainer that every criterion is a function of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from adloco_dist.noise.statistics import GradientStatistics


@dataclass(frozen=True)
class TrainerView:
    """A trainer after a round, as rank 0 knows it."""

    request: float
    """Total batch that it asks for, before bounds; infinite if only noise was measured."""
    bounded: float
    """The same after the bounds."""
    is_finite: bool = True
    """Whether its anchor is finite."""
    train_loss: float | None = None
    """Mean over its workers in the last round, in nats per target; NaN or infinite where a worker's was."""
    validation_loss: float | None = None
    """Loss of its anchor at the end of the last round, in nats per target; None: it was not evaluated then."""
    statistics: GradientStatistics | None = None
    """Running averages that the request was computed from; None: nothing was measured yet."""
    tokens: int = 0
    """Tokens that it trained on in the last round."""
    ranks: tuple[int, ...] = ()
    link_bytes_per_second: float | None = None
    """Rate of the slowest link between its nodes; None: it has only one node, or a link was not measured."""


@dataclass(frozen=True)
class Network:
    """The nodes of the ranks, and what was measured of the links between them."""

    nodes: Sequence[int] = ()
    """The node of each rank; empty where it is not known."""
    bytes_per_second: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Measured rates of links, by pair of nodes, the lower one first; a link that was not measured is missing."""

    def slowest_link(self, ranks: Iterable[int]) -> float | None:
        """The bytes per second of the slowest link between the nodes of `ranks`; None: there is none, or unknown."""
        nodes = {self.nodes[rank] for rank in ranks} if self.nodes else set[int]()
        rates = [self.bytes_per_second.get(pair) for pair in combinations(sorted(nodes), 2)]
        measured = [rate for rate in rates if rate is not None]
        return min(measured, default=None) if len(measured) == len(rates) else None
