"""What an evaluation comes to."""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """Sums over sequences, which add up over the parts that ranks evaluate."""

    loss_sum: float = 0.0
    """Of the targets, in nats."""
    targets: int = 0
    """Tokens, or labels."""
    correct: int = 0
    """Labels that were the likeliest; tokens are not counted."""

    def __add__(self, other: "Evaluation") -> "Evaluation":
        return Evaluation(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        """In nats per target."""
        return self.loss_sum / self.targets

    def figures(self, is_labelled: bool) -> dict[str, float]:
        """By name: the loss, and perplexity, or of labels the accuracy."""
        if is_labelled:
            return {"validation_loss": self.loss, "validation_accuracy": self.correct / self.targets}
        return {"validation_loss": self.loss, "validation_perplexity": perplexity(self.loss)}


def perplexity(loss: float) -> float:
    """exp(loss), without overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def in_words(figures: Mapping[str, Any]) -> str:
    """The figure that people compare: perplexity, or accuracy; unknown where the loss is not finite (null in files)."""
    name, digits = ("accuracy", 4) if "validation_accuracy" in figures else ("perplexity", 3)
    value = figures[f"validation_{name}"]
    return f"{name} unknown" if value is None else f"{name} {value:.{digits}f}"
