"""Which trainers merge (AdLoCo 2508.18182, Algorithms CHECK_MERGE and DO_MERGE)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adloco_dist.config import MergePolicy, MergeSettings, MergeWeights


@dataclass(frozen=True)
class Standing:
    """How a trainer stands when merges are decided."""

    request: float
    """Total batch that it asks for, before bounds."""
    bounded: float
    """The same after them."""
    is_finite: bool = True
    """Whether its anchor is."""


@dataclass(frozen=True)
class Merge:
    """Several trainers that become one."""

    survivor: int
    """The one with the largest request: it keeps its id and its request."""
    shares: Mapping[int, float]
    """What every member's anchor and outer momentum count for in the average; 0: not finite, left out."""
    standings: Mapping[int, Standing]
    """Of every member, as they decided it."""

    @property
    def ended(self) -> list[int]:
        """The members that are no more, ascending."""
        return sorted(member for member in self.shares if member != self.survivor)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "Merge":
        """The merge of a plan's message, or of a record, where null stands for an infinite request."""
        shares = {int(member): share for member, share in message["shares"].items()}
        standings = {
            int(member): Standing(
                math.inf if standing["request"] is None else standing["request"],
                standing["bounded"],
                standing["is_finite"],
            )
            for member, standing in message["standings"].items()
        }
        return cls(message["survivor"], shares, standings)


def choose_merges(merge: MergeSettings, standings: Mapping[int, Standing]) -> tuple[Merge, ...]:
    """The merges of one round: by requests of whole trainers, the weakest first; of equal ones the lower id first.

    Trainers that are not finite are the weakest. A merge needs one that is finite to take the others in.
    """
    merges: list[Merge] = []
    candidates, num_left = dict(standings), len(standings)
    for _ in range(merge.simultaneous):
        width = min(merge.width, num_left - merge.min_trainers + 1, len(candidates))
        chosen = _choose(merge.policy, candidates, width)
        if not chosen:
            break
        members = {trainer: candidates.pop(trainer) for trainer in chosen}
        survivor = _strongest(members)
        merges.append(Merge(survivor, _shares(merge.weights, members), dict(sorted(members.items()))))
        num_left -= len(members) - 1
    return tuple(merges)


def _choose(policy: MergePolicy, candidates: Mapping[int, Standing], width: int) -> list[int]:
    """`width` trainers of which one at least is finite; none where that cannot be."""
    finite = [trainer for trainer, standing in candidates.items() if standing.is_finite]
    if policy is MergePolicy.none or width < 2 or not finite:
        return []
    weakest_first = sorted(candidates, key=lambda id: (candidates[id].is_finite, candidates[id].request, id))
    if policy is MergePolicy.best_with_worst:
        keeper = _strongest(candidates)
    else:
        keeper = next(id for id in weakest_first[width - 1 :] if candidates[id].is_finite)
    return [keeper, *[trainer for trainer in weakest_first if trainer != keeper][: width - 1]]


def _strongest(standings: Mapping[int, Standing]) -> int:
    return max(standings, key=lambda id: (standings[id].is_finite, standings[id].request, -id))


def _shares(weights: MergeWeights, members: Mapping[int, Standing]) -> dict[int, float]:
    uniform = weights is MergeWeights.uniform
    counts = {
        id: (1.0 if uniform else standing.bounded) if standing.is_finite else 0.0
        for id, standing in sorted(members.items())
    }
    total = sum(counts.values())
    return {id: count / total for id, count in counts.items()}
