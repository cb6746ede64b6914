"""Which trainers merge (AdLoCo 2508.18182, Algorithms CHECK_MERGE and DO_MERGE)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adloco_dist.config import MergePolicy, MergeSettings, MergeWeights
from adloco_dist.policy.merge_by_loss import worst_loss_with_best
from adloco_dist.policy.merge_by_request import best_with_worst, worst_with_worst
from adloco_dist.policy.views import TrainerView

Choose = Callable[[Mapping[int, TrainerView], int], list[int]]
"""A merge policy: chooses `width` >= 1 of the candidates, all of which are finite; the first one survives."""


@dataclass(frozen=True)
class Merge:
    """Several trainers that become one."""

    survivor: int
    """The member that keeps its id and its request."""
    shares: Mapping[int, float]
    """What every member's anchor and outer momentum count for in the average; 0: not finite, left out."""
    candidates: Mapping[int, TrainerView]
    """Every member as the policy saw it."""

    @property
    def ended(self) -> list[int]:
        """The members that end, ascending."""
        return sorted(member for member in self.shares if member != self.survivor)


def choose_merges(merge: MergeSettings, candidates: Mapping[int, TrainerView]) -> tuple[Merge, ...]:
    """The merges of one round, each of trainers that no earlier one has taken.

    Trainers that are not finite go first, whatever the policy: each merge takes in as many as its width allows, and a
    finite one survives.
    """
    choose = _policy(merge.policy)
    if choose is None:
        return ()
    merges: list[Merge] = []
    remaining, num_left = dict(candidates), len(candidates)
    for _ in range(merge.simultaneous):
        width = min(merge.width, num_left - merge.min_trainers + 1, len(remaining))
        finite = {trainer: view for trainer, view in remaining.items() if view.is_finite}
        if width < 2 or not finite:
            break
        nonfinite = sorted(remaining.keys() - finite.keys())[: width - 1]
        survivor, *others = choose(finite, width - len(nonfinite))
        members = {trainer: remaining.pop(trainer) for trainer in sorted([survivor, *others, *nonfinite])}
        merges.append(Merge(survivor, _shares(merge.weights, members), members))
        num_left -= len(members) - 1
    return tuple(merges)


def _policy(name: MergePolicy) -> Choose | None:
    """The function of that name; None: trainers never merge."""
    match name:
        case MergePolicy.worst_with_worst:
            return worst_with_worst
        case MergePolicy.best_with_worst:
            return best_with_worst
        case MergePolicy.worst_loss_with_best:
            return worst_loss_with_best
        case MergePolicy.none:
            return None


def _shares(weights: MergeWeights, members: Mapping[int, TrainerView]) -> dict[int, float]:
    uniform = weights is MergeWeights.uniform
    counts = {
        trainer: (1.0 if uniform else view.bounded) if view.is_finite else 0.0 for trainer, view in members.items()
    }
    total = sum(counts.values())
    return {trainer: count / total for trainer, count in counts.items()}
