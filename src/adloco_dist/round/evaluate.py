"""Validation loss of given weights, on one rank's part of the validation split."""

from dataclasses import dataclass

import numpy as np
import torch

from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.layout import Layout
from adloco_dist.models import token_losses
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
    flat_model: FlatModel, weights: torch.Tensor, store: TokenStore, max_sequences: int | None, batch: int, part: Part
) -> tuple[float, int]:
    """Evaluate `weights` on this rank's part of at most `max_sequences` sequences, spread evenly over the split.

    Returns:
        The sum of the tokens' losses in nats, and the number of tokens; both add up over the parts.
    """
    num_sequences = min(store.num_sequences, max_sequences or store.num_sequences)
    chosen = np.arange(num_sequences) * store.num_sequences // num_sequences
    loss_sum = torch.zeros((), dtype=torch.float64, device=flat_model.device)
    num_tokens = 0
    with flat_model.borrowed(weights) as module:
        mine = chosen[part.index :: part.count]
        for start in range(0, len(mine), batch):
            tokens = store.sequences(mine[start : start + batch]).to(flat_model.device)
            losses = token_losses(module, tokens)
            loss_sum += losses.sum(dtype=torch.float64)
            num_tokens += losses.numel()
    return float(loss_sum), num_tokens
