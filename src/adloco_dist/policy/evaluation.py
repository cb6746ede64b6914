"""What an evaluation comes to."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from adloco_dist.config import EvaluationSettings

PERPLEXITY, ACCURACY = "perplexity", "accuracy"


@dataclass(frozen=True)
class Subsets:
    """Which validation sequences what is evaluated on, by their places in the split."""

    curve: Sequence[int]
    """Anchors while training: the first of `final`, so that what a curve ends with is comparable with the result."""
    final: Sequence[int]
    """The result at the end."""
    choice: Sequence[int]
    """What is saved is chosen on these: the best of several on `final` would look better there than it is."""


def subsets(num_sequences: int, settings: EvaluationSettings) -> Subsets:
    """Divide a split: `choice` takes as many as a curve, at most half, and nothing of what is reported."""
    order = in_order(num_sequences)
    reported = order[: num_sequences - min(settings.sequences, num_sequences // 2)]
    choice = order[len(reported) :] or reported
    return Subsets(reported[: settings.sequences], reported[: settings.final_sequences], choice)


@cache
def in_order(num_sequences: int) -> list[int]:
    """The order in which sequences of a split are taken where not all are: the same in every run."""
    return random.Random(0).sample(range(num_sequences), num_sequences)


@dataclass(frozen=True)
class Evaluation:
    """Sums over sequences, which add up over the parts that ranks evaluate."""

    loss_sum: float = 0.0
    """Sum over the targets; in nats for the built-in objective."""
    targets: int = 0
    """Number of targets: tokens, or labels."""
    correct: int = 0
    """Labels that were the likeliest; tokens are not counted."""
    figure: str = ""
    """What people compare beside the loss: PERPLEXITY, or of labels ACCURACY; empty: nothing."""

    def __add__(self, other: "Evaluation") -> "Evaluation":
        return Evaluation(
            self.loss_sum + other.loss_sum,
            self.targets + other.targets,
            self.correct + other.correct,
            self.figure or other.figure,
        )

    @property
    def loss(self) -> float:
        """The mean over the targets."""
        return self.loss_sum / self.targets

    def figures(self) -> dict[str, float]:
        """Return the loss, and what people compare beside it, by name."""
        figures = {"validation_loss": self.loss}
        if self.figure == ACCURACY:
            figures["validation_accuracy"] = self.correct / self.targets
        elif self.figure == PERPLEXITY:
            figures["validation_perplexity"] = perplexity(self.loss)
        return figures


def total(parts: Iterable[Evaluation | None]) -> Evaluation | None:
    """The sum of the parts that ranks evaluated; None: none of them evaluated any."""
    evaluated = [part for part in parts if part]
    return sum(evaluated, Evaluation()) if evaluated else None


def perplexity(loss: float) -> float:
    """exp(loss), without overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def in_words(figures: Mapping[str, Any]) -> str:
    """Return the figure that people compare; it is unknown where the loss is not finite (null in files)."""
    names = {"validation_accuracy": 4, "validation_perplexity": 3, "validation_loss": 4}
    key, digits = next(item for item in names.items() if item[0] in figures)
    name, value = "validation loss" if key == "validation_loss" else key.removeprefix("validation_"), figures[key]
    return f"{name} unknown" if value is None else f"{name} {value:.{digits}f}"


def candidate_name(trainer: int) -> str:
    """What a trainer is called in the result of a run."""
    return f"trainer {trainer}"
