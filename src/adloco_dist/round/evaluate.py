"""Validation loss of given weights, on some sequences of the validation split."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch.profiler import record_function

from adloco_dist.data.protocols import SequenceTable
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.evaluation import Evaluation, subsets
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.report import EvaluationReport
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import own_sequences
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.timing import timed

BATCH = 16
"""Sequences of a forward pass, where the device takes as many."""


def evaluate(
    flat_model: FlatModel,
    objective: Objective,
    weights: torch.Tensor,
    table: SequenceTable,
    chosen: Sequence[int],
    batch: int,
) -> Evaluation:
    """Evaluate `weights` on some sequences of the split.

    Args:
        chosen: their places (policy/evaluation.py).
        batch: sequences of a forward pass; fewer where the device takes fewer, or has no memory left.
    """
    sums = Evaluation()
    with flat_model.borrowed(weights) as module:
        mine, start = np.array(chosen), 0
        size = min(batch, flat_model.capacity or batch)
        while start < len(mine):
            sequences = table.batch(mine[start : start + size]).to(flat_model.device)
            own, counts = own_sequences(sequences, flat_model.shards)
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


def evaluate_part(pool: LocalPool, weights: torch.Tensor, chosen: Sequence[int], ranks: Sequence[int]) -> Evaluation:
    """Evaluate `weights` on this rank's part of some of the run's validation sequences, which `ranks` share."""
    mine = chosen[ranks.index(pool.runtime.seat) :: len(ranks)]
    return evaluate(pool.flat_model, pool.objective, weights, pool.splits.validation, mine, BATCH)


@record_function("evaluation")
def evaluate_anchors(pool: LocalPool, layout: Layout, trainers: Collection[int]) -> dict[int, EvaluationReport]:
    """Evaluate trainers' anchors, or the averages of their anchors, on this rank's part of the validation sequences.

    Args:
        trainers: of which those on this rank are evaluated.
    """
    reports = {}
    chosen = subsets(pool.splits.validation.num_sequences, pool.settings.evaluation).curve
    for trainer_id in sorted(pool.trainers.keys() & trainers):
        with timed(pool.runtime.device) as timing:
            sums = evaluate_part(pool, pool.trainers[trainer_id].result, chosen, layout.ranks(trainer_id))
        reports[trainer_id] = EvaluationReport(sums, timing.seconds)
    return reports
