"""Validation loss of given weights, on one rank's part of the validation split."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adloco_dist.data.protocols import SequenceTable
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.evaluation import Evaluation
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import share


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
    flat_model: FlatModel, objective: Objective, weights: torch.Tensor, table: SequenceTable, chosen: Sequence[int],
    batch: int, part: Part,
) -> Evaluation:  # fmt: skip
    """Evaluate `weights` on this rank's part of some sequences of the split.

    Args:
        chosen: their places (policy/evaluation.py).
        batch: sequences of a forward pass; fewer where the device takes fewer, or has no memory left.
    """
    sums = Evaluation()
    with flat_model.borrowed(weights) as module:
        mine, start = np.array(chosen[part.index :: part.count]), 0
        size = min(batch, flat_model.capacity or batch)
        while start < len(mine):
            sequences = table.batch(mine[start : start + size]).to(flat_model.device)
            own, counts = share(sequences, flat_model.shards)
            evaluated: Evaluation | None = None
            try:
                evaluated = objective.evaluate(module, own)
            except RuntimeError as error:
                # Ranks that hold the module together wait in the pass that failed.
                if not is_out_of_memory(error) or size == 1 or flat_model.shards.ranks:
                    raise
            if evaluated is None:  # outside of the handler: the error's traceback holds what the failed pass had
                size //= 2
                free_device_memory()
                continue
            sums += evaluated if counts else Evaluation()
            start += len(sequences)
    return sums
