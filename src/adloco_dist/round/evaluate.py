"""Validation loss of given weights, on one rank's part of the validation split."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from adloco_dist.data.batch import Batch
from adloco_dist.data.tokens import Store
from adloco_dist.decisions.evaluation import Evaluation
from adloco_dist.decisions.layout import Layout
from adloco_dist.losses import losses_of, predict
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.flat_model import FlatModel


@dataclass(frozen=True)
class Part:
    """Which of the sequences a rank evaluates: every `count`-th from `index` on."""

    index: int
    count: int


def part_of(rank: int, trainer: int, layout: Layout) -> Part:
    """The part of one of the trainer's ranks, which share its evaluation."""
    ranks = layout.ranks(trainer)
    return Part(ranks.index(rank), len(ranks))


def evaluate(
    flat_model: FlatModel, weights: torch.Tensor, store: Store, max_sequences: int | None, batch: int, part: Part
) -> Evaluation:
    """Evaluate `weights` on this rank's part of at most `max_sequences` sequences, spread evenly over the split.

    Args:
        batch: sequences of a forward pass; fewer where the device takes fewer, or has no memory left.
    """
    num_sequences = min(store.num_sequences, max_sequences or store.num_sequences)
    chosen = np.arange(num_sequences) * store.num_sequences // num_sequences
    loss_sum = torch.zeros((), dtype=torch.float64, device=flat_model.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=flat_model.device)
    num_targets = 0
    with flat_model.borrowed(weights) as module:
        mine, start = chosen[part.index :: part.count], 0
        size = min(batch, flat_model.capacity or batch)
        while start < len(mine):
            sequences = store.batch(mine[start : start + size]).to(flat_model.device)
            sums: tuple[torch.Tensor, torch.Tensor] | None = None
            try:
                sums = _sums(module, sequences)
            except RuntimeError as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
            if sums is None:  # outside of the handler: the error's traceback holds what the failed pass had
                size //= 2
                free_device_memory()
                continue
            loss_sum += sums[0]
            num_correct += sums[1]
            num_targets += sequences.total_targets
            start += len(sequences)
    return Evaluation(float(loss_sum), num_targets, int(num_correct))


def _sums(module: nn.Module, sequences: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss in nats and, of a classifier, the right answers, summed over the sequences; scalars on the device."""
    logits = predict(module, sequences)
    loss = losses_of(logits, sequences).sum(dtype=torch.float64)
    if sequences.labels is None:
        return loss, torch.zeros((), dtype=torch.int64, device=loss.device)
    return loss, (logits.argmax(-1) == sequences.labels).sum()
