"""Validation losses on some sequences of the split: of anchors in a round, of all candidates at the end of a run."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.devices import timed
from adloco_dist.config import Final
from adloco_dist.data.protocols import SequenceTable
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.evaluation import Evaluation, candidate_name, subsets
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.report import EvaluationReport
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import own_sequences
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.combine import Transfer, combine

BATCH = 16
"""Sequences of a forward pass, where the device takes as many."""
AVERAGE = "average of all trainers"


def evaluate(
    flat_model: FlatModel,
    objective: Objective,
    weights: torch.Tensor,
    table: SequenceTable,
    chosen: Sequence[int],
    batch: int,
) -> Evaluation:
    """Evaluate `weights` on the sequences at the places `chosen` of the split (policy/evaluation.py), `batch` of them
    in a forward pass: fewer where the device takes fewer, or has no memory left."""
    sums = Evaluation()
    with flat_model.borrowed(weights) as module:
        places, start = np.array(chosen), 0
        size = min(batch, flat_model.capacity or batch)
        while start < len(places):
            sequences = table.batch(places[start : start + size]).to(flat_model.device)
            of_rank, counts = own_sequences(sequences, flat_model.shards)
            evaluated: Evaluation | None = None
            try:
                evaluated = objective.evaluate(module, of_rank)
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
    places = chosen[ranks.index(pool.runtime.seat) :: len(ranks)]
    return evaluate(pool.flat_model, pool.objective, weights, pool.splits.validation, places, BATCH)


@record_function("evaluation")
def evaluate_anchors(pool: LocalPool, layout: Layout, trainers: Collection[int]) -> dict[int, EvaluationReport]:
    """Evaluate the anchors of those of the trainers that are on this rank, or the averages of their anchors, on this
    rank's part of the validation sequences."""
    reports = {}
    chosen = subsets(pool.splits.validation.num_sequences, pool.settings.evaluation).curve
    for trainer_id in sorted(pool.trainers.keys() & trainers):
        with timed(pool.runtime.device) as timing:
            sums = evaluate_part(pool, pool.trainers[trainer_id].result, chosen, layout.ranks(trainer_id))
        reports[trainer_id] = EvaluationReport(sums, timing.seconds)
    return reports


@record_function("finish")
def finish(pool: LocalPool, layout: Layout) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate all candidates and choose the trainer with the smallest validation loss, or the average of all.

    Trainers that are not finite are in no average, and never chosen. The choice is made on other sequences than those
    that the result is reported of. Collective.

    Returns:
        The result (the same on all ranks), and on the first seat the weights that were chosen: none of trainers that
        are all not finite.
    """
    flat_model, runtime = pool.flat_model, pool.runtime
    chosen = subsets(pool.splits.validation.num_sequences, pool.settings.evaluation)

    def losses(sequences: Sequence[int]) -> dict[str, Evaluation]:
        """Every trainer's, by name. Collective."""
        sums = {
            candidate_name(trainer.id): evaluate_part(pool, trainer.result, sequences, layout.ranks(trainer.id))
            for trainer in pool.trainers.values()
        }
        return _exchange(runtime.control, sums)

    evaluated = losses(chosen.final)
    finite = [trainer_id for trainer_id in layout.trainers if math.isfinite(evaluated[candidate_name(trainer_id)].loss)]
    compared = losses(chosen.choice) if len(finite) > 1 else evaluated
    best = min(finite, key=lambda trainer_id: (compared[candidate_name(trainer_id)].loss, trainer_id), default=None)
    averaged = len(layout.trainers) > 1 and len(finite) > 0
    if averaged:
        seats = tuple(range(runtime.num_seats))
        _bring(pool, layout, dict.fromkeys(finite, 1 / len(finite)), seats)
        sums = evaluate_part(pool, flat_model.gradient, chosen.final, seats)
        evaluated |= _exchange(runtime.control, {AVERAGE: sums})
    saves_average = pool.settings.final is Final.average and averaged and math.isfinite(evaluated[AVERAGE].loss)
    saved = AVERAGE if saves_average else None if best is None else candidate_name(best)
    result = {
        "saved": saved,
        "trainer": None if saves_average else best,
        "validation_targets": next(iter(evaluated.values())).targets,
        "candidates": [{"name": name, **sums.figures()} for name, sums in evaluated.items()],
    }
    if best is not None and not saves_average:  # the average, evaluated last, is still where weights are brought to
        _bring(pool, layout, {best: 1.0}, (0,))
    return result, flat_model.gradient if runtime.seat == 0 and saved else None


def _bring(pool: LocalPool, layout: Layout, shares: Mapping[int, float], needed: tuple[int, ...]) -> None:
    """Bring the trainers' results in these shares into the flat model's gradient on the seats in `needed`."""
    wanted = Transfer.of(shares, layout, needed)
    group = pool.groups.of(wanted.ranks)
    if pool.runtime.seat in wanted.ranks:
        results = {trainer_id: trainer.result for trainer_id, trainer in pool.trainers.items()}
        combine(results, wanted, pool.flat_model.gradient, group, pool.runtime.seat)


def _exchange(control: ControlPlane, sums: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Every candidate's evaluation, from the parts that the ranks evaluated; by name. Collective."""
    whole: dict[str, Evaluation] = {}
    for reply in control.exchange({"sums": {name: asdict(part) for name, part in sums.items()}}):
        for name, part in reply["sums"].items():
            whole[name] = whole.get(name, Evaluation()) + Evaluation(**part)
    return dict(sorted(whole.items(), key=lambda item: (len(item[0]), item[0])))
