"""Batches of token ids, which a language model is given at one time.

Shape suffixes: B sequences, W tokens of the longest of them.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class TokenBatch:
    """Sequences for one micro-batch, or to be split into several."""

    tokens: torch.Tensor
    """(B, W) ids, padded at the right. Of a causal model, position t predicts t + 1; of a classifier, all of them the
    label."""
    num_targets: tuple[int, ...]
    """What is predicted of each sequence: tokens, or one label. Kept on the CPU, because it weighs the losses."""
    lengths: torch.Tensor | None = None
    """(B,) tokens of each that are not padding; None: all W."""
    labels: torch.Tensor | None = None
    """(B,) class of each sequence; None: the model is causal."""

    @classmethod
    def packed(cls, tokens: torch.Tensor) -> "TokenBatch":
        """A batch of sequences without padding, (B, L + 1), that predict L tokens each."""
        return cls(tokens, (tokens.shape[1] - 1,) * len(tokens))

    def __len__(self) -> int:
        return len(self.num_targets)

    @property
    def total_targets(self) -> int:
        return sum(self.num_targets)

    def part(self, start: int, end: int) -> "TokenBatch":
        """Sequences `start` to `end`, without the columns that are padding in all of them."""
        lengths = None if self.lengths is None else self.lengths[start:end]
        labels = None if self.labels is None else self.labels[start:end]
        num_targets = self.num_targets[start:end]
        width = self.tokens.shape[1] if labels is not None or lengths is None else max(num_targets) + 1
        return TokenBatch(self.tokens[start:end, :width], num_targets, lengths, labels)

    def split(self, micro_batch_size: int) -> list["TokenBatch"]:
        """Micro-batches of `micro_batch_size` sequences each; the last may be smaller."""
        starts = range(0, len(self), micro_batch_size)
        return [self.part(start, min(start + micro_batch_size, len(self))) for start in starts]

    def chunks(self, count: int) -> list["TokenBatch"]:
        """`count` batches whose sizes differ by at most one sequence, larger ones first."""
        sizes = [len(part) for part in torch.arange(len(self)).tensor_split(count)]
        ends = [sum(sizes[: number + 1]) for number in range(count)]
        return [self.part(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def to(self, device: torch.device) -> "TokenBatch":
        """The same sequences on `device`; a GPU receives them through pinned memory, without waiting."""
        if self.tokens.device == device:
            return self
        return replace(
            self, tokens=_sent(self.tokens, device), lengths=_sent(self.lengths, device),
            labels=_sent(self.labels, device),
        )  # fmt: skip


def _sent(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None:
        return None
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
