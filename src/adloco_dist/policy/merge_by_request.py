"""Merge policies that compare the batches that trainers ask for (AdLoCo 2508.18182, Algorithm CHECK_MERGE).

Requests are those of whole trainers, before bounds; of equal ones, the lower id is the weaker.
"""

from collections.abc import Iterable, Mapping

from adloco_dist.policy.views import TrainerView


def worst_with_worst(candidates: Mapping[int, TrainerView], width: int) -> list[int]:
    """The `width` trainers with the smallest requests merge into the one of them with the largest."""
    chosen = _weakest_first(candidates)[:width]
    survivor = _strongest(candidates, chosen)
    return [survivor, *(trainer for trainer in chosen if trainer != survivor)]


def best_with_worst(candidates: Mapping[int, TrainerView], width: int) -> list[int]:
    """The trainers with the smallest requests merge into the one with the largest of all."""
    survivor = _strongest(candidates, candidates)
    weakest = [trainer for trainer in _weakest_first(candidates) if trainer != survivor]
    return [survivor, *weakest[: width - 1]]


def _weakest_first(candidates: Mapping[int, TrainerView]) -> list[int]:
    return sorted(candidates, key=lambda trainer: (candidates[trainer].request, trainer))


def _strongest(candidates: Mapping[int, TrainerView], among: Iterable[int]) -> int:
    """The trainer with the largest request; of equal ones, the lower id survives."""
    return max(among, key=lambda trainer: (candidates[trainer].request, -trainer))
