"""A merge policy that compares the trainers' losses."""

import math
from collections.abc import Mapping

from adloco_dist.policy.views import TrainerView


def worst_loss_with_best(candidates: Mapping[int, TrainerView], width: int) -> list[int]:
    """The trainers with the largest losses merge into the one with the smallest; of equal ones, the lower id is better.

    Validation losses decide if all candidates were evaluated in the last round, training losses otherwise.
    """
    is_evaluated = all(view.validation_loss is not None for view in candidates.values())

    def loss(trainer: int) -> float:
        view = candidates[trainer]
        value = view.validation_loss if is_evaluated else view.train_loss
        return math.inf if value is None or math.isnan(value) else value

    best, *others = sorted(candidates, key=lambda trainer: (loss(trainer), trainer))
    return [best, *others[::-1][: width - 1]]
