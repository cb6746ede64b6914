"""Which trainers merge, and what becomes of them (AdLoCo 2508.18182, Algorithms CHECK_MERGE and DO_MERGE)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from adloco_dist.config import MergePolicy, MergeSettings
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.layout import Layout


@dataclass(frozen=True)
class TrainerView:
    """A trainer after a round, as rank 0 knows it: what every policy decides from."""

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
        slowest = min((self.bytes_per_second.get(pair, 0.0) for pair in combinations(sorted(nodes), 2)), default=0.0)
        return slowest or None


Candidates = Mapping[int, TrainerView]


@dataclass(frozen=True)
class Merge:
    """Several trainers that become one, from the plan to the records: their workers all work for the survivor."""

    survivor: int
    """The member that keeps its id and its request."""
    shares: Mapping[int, float]
    """What every member's anchor and outer momentum count for in the average; 0: not finite, left out."""
    candidates: Candidates = field(default_factory=dict)
    """Every member as the policy saw it."""
    policy: str = ""
    """What chose them: a merge policy, or `replay`."""
    member_losses: Mapping[int, float | None] = field(default_factory=dict)
    """Validation losses of the members' anchors before the merge, once it was made and recorded."""
    loss: float | None = None
    """Validation loss of their average; None: it was not evaluated."""

    @property
    def ended(self) -> list[int]:
        """The members that end, ascending."""
        return sorted(member for member in self.shares if member != self.survivor)

    def origins(self, layout: Layout) -> list[tuple[int, int]]:
        """The survivor's workers in the order of their new ids, its own first: trainer and id of each in the layout
        before. Ranks play no part in it, so the run does not depend on the layout."""
        members = (self.survivor, *self.ended)
        return [(trainer, worker) for trainer in members for worker in range(layout.num_workers(trainer))]

    def layout_after(self, layout: Layout) -> Layout:
        """The layout after the merge: every worker stays on its ranks."""
        kept = {trainer: workers for trainer, workers in layout.workers.items() if trainer not in self.shares}
        joined = tuple(layout.workers[trainer][worker] for trainer, worker in self.origins(layout))
        return Layout({**kept, self.survivor: joined})


def choose_merge(settings: MergeSettings, candidates: Candidates) -> Merge | None:
    """The merge before a round; None: no trainers merge.

    Members count for their bounded requests. Trainers that are not finite go first, whatever the policy: a merge takes
    in as many as its width allows, and a finite one survives.
    """
    width = min(settings.width, len(candidates) - settings.min_trainers + 1)
    finite = {trainer: view for trainer, view in candidates.items() if view.is_finite}
    if settings.policy is MergePolicy.none or width < 2 or not finite:
        return None
    nonfinite = sorted(candidates.keys() - finite.keys())[: width - 1]
    survivor, *others = POLICIES[settings.policy](finite, width - len(nonfinite))
    members = {trainer: candidates[trainer] for trainer in sorted([survivor, *others, *nonfinite])}
    counts = {trainer: view.bounded if view.is_finite else 0.0 for trainer, view in members.items()}
    total = sum(counts.values())
    shares = {trainer: count / total for trainer, count in counts.items()}
    return Merge(survivor, shares, members, settings.policy.name)


def worst_with_worst(candidates: Candidates, width: int) -> list[int]:
    """The `width` trainers with the smallest requests merge into the one of them with the largest.

    Requests are those of whole trainers, before bounds; of equal ones, the lower id is the weaker, and survives.
    """
    weakest = _weakest_first(candidates)[:width]
    return best_with_worst({trainer: candidates[trainer] for trainer in weakest}, width)


def best_with_worst(candidates: Candidates, width: int) -> list[int]:
    """The trainers with the smallest requests merge into the one with the largest of all."""
    survivor = max(candidates, key=lambda trainer: (candidates[trainer].request, -trainer))
    weakest = [trainer for trainer in _weakest_first(candidates) if trainer != survivor]
    return [survivor, *weakest[: width - 1]]


def worst_loss_with_best(candidates: Candidates, width: int) -> list[int]:
    """The trainers with the largest losses merge into the one with the smallest; of equal ones, the lower id is better.

    Validation losses decide if all candidates were evaluated in the last round, training losses otherwise.
    """
    is_evaluated = all(view.validation_loss is not None for view in candidates.values())

    def loss(trainer: int) -> tuple[float, int]:
        view = candidates[trainer]
        value = view.validation_loss if is_evaluated else view.train_loss
        return math.inf if value is None or math.isnan(value) else value, trainer

    best, *others = sorted(candidates, key=loss)
    return [best, *others[::-1][: width - 1]]


def _weakest_first(candidates: Candidates) -> list[int]:
    return sorted(candidates, key=lambda trainer: (candidates[trainer].request, trainer))


Choose = Callable[[Candidates, int], list[int]]
"""A merge policy: chooses `width` >= 1 of the candidates, all of which are finite; the first one survives."""
POLICIES: Mapping[MergePolicy, Choose] = {
    MergePolicy.worst_with_worst: worst_with_worst,
    MergePolicy.best_with_worst: best_with_worst,
    MergePolicy.worst_loss_with_best: worst_loss_with_best,
}
