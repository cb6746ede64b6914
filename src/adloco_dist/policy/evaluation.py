"""What an evaluation comes to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PERPLEXITY, ACCURACY = "perplexity", "accuracy"


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
        if self.figure == ACCURACY:
            return {"validation_loss": self.loss, "validation_accuracy": self.correct / self.targets}
        if self.figure == PERPLEXITY:
            return {"validation_loss": self.loss, "validation_perplexity": perplexity(self.loss)}
        return {"validation_loss": self.loss}


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
