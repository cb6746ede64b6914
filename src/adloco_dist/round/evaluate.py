"""Validation loss of given weights, on one rank's part of the validation split."""

from dataclasses import dataclass

import numpy as np
import torch

from adloco_dist.data.tokens import Store
from adloco_dist.decisions.evaluation import Evaluation
from adloco_dist.decisions.layout import Layout
from adloco_dist.losses import losses_of, predict
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
    """Evaluate `weights` on this rank's part of at most `max_sequences` sequences, spread evenly over the split."""
    num_sequences = min(store.num_sequences, max_sequences or store.num_sequences)
    chosen = np.arange(num_sequences) * store.num_sequences // num_sequences
    loss_sum = torch.zeros((), dtype=torch.float64, device=flat_model.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=flat_model.device)
    num_targets = 0
    with flat_model.borrowed(weights) as module:
        mine = chosen[part.index :: part.count]
        for start in range(0, len(mine), batch):
            sequences = store.batch(mine[start : start + batch]).to(flat_model.device)
            logits = predict(module, sequences)
            loss_sum += losses_of(logits, sequences).sum(dtype=torch.float64)
            num_targets += sequences.total_targets
            if sequences.labels is not None:
                num_correct += (logits.argmax(-1) == sequences.labels).sum()
    return Evaluation(float(loss_sum), num_targets, int(num_correct))
