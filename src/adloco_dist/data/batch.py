"""What a model is given at one time.

Shape suffixes: B sequences, W tokens of the longest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """Sequences for one pass, or to be cut into several."""

    tokens: torch.Tensor
    """(B, W) ids, padded at the right. Of a causal model, position t predicts t + 1; of a classifier, all of them the
    label."""
    num_targets: tuple[int, ...]
    """What is predicted of each sequence: tokens, or one label. Kept on the CPU, for it weighs the losses."""
    lengths: torch.Tensor | None = None
    """(B,) tokens of each that are not padding; None: all W."""
    labels: torch.Tensor | None = None
    """(B,) class of each sequence; None: the model is causal."""

    @classmethod
    def packed(cls, tokens: torch.Tensor) -> "Batch":
        """Of sequences without padding, (B, L + 1), that predict L tokens each."""
        return cls(tokens, (tokens.shape[1] - 1,) * len(tokens))

    def __len__(self) -> int:
        return len(self.num_targets)

    @property
    def total_targets(self) -> int:
        return sum(self.num_targets)

    def part(self, start: int, end: int) -> "Batch":
        """Sequences `start` to `end`, without the columns that are padding in all of them."""
        lengths = None if self.lengths is None else self.lengths[start:end]
        labels = None if self.labels is None else self.labels[start:end]
        num_targets = self.num_targets[start:end]
        width = self.tokens.shape[1] if labels is not None or lengths is None else max(num_targets) + 1
        return Batch(self.tokens[start:end, :width], num_targets, lengths, labels)

    def split(self, size: int) -> list["Batch"]:
        """Parts of `size` sequences each, but for the last."""
        return [self.part(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def pieces(self, count: int) -> list["Batch"]:
        """`count` parts whose sizes differ by one sequence at most, larger ones first."""
        sizes = [len(part) for part in torch.arange(len(self)).tensor_split(count)]
        ends = [sum(sizes[: place + 1]) for place in range(count)]
        return [self.part(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def to(self, device: torch.device) -> "Batch":
        """On `device`; to a GPU through pinned memory, without waiting for it."""
        if self.tokens.device == device:
            return self
        return replace(
            self, tokens=_sent(self.tokens, device), lengths=_sent(self.lengths, device),
            labels=_sent(self.labels, device),
        )  # fmt: skip


def relative_sizes(batch: Batch, pieces: Sequence[Batch]) -> list[float]:
    """What the pieces of a batch weigh in its mean: targets over the batch's mean targets per sequence.

    Their sum is the number of sequences; without padding they are the pieces' numbers of sequences.
    """
    per_sequence = batch.total_targets / len(batch)
    return [piece.total_targets / per_sequence for piece in pieces]


def _sent(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None:
        return None
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
