"""The end of a run: every trainer's anchor and their average evaluated, what is to be saved brought to rank 0."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import record_function

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import Final
from adloco_dist.policy.evaluation import Evaluation, candidate_name, subsets
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.combine import Transfer, combine
from adloco_dist.round.evaluate import evaluate_part

AVERAGE = "average of all trainers"


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
