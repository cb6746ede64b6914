"""The end of a run: every trainer's anchor and their average evaluated, what is to be saved brought to rank 0."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import EvaluationSettings, Final
from adloco_dist.data.protocols import SequenceTable
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.evaluation import Evaluation, candidate_name, subsets
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.regrouping import transfer
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.evaluate import Part, evaluate, part_of
from adloco_dist.round.merge import combine

AVERAGE = "average of all trainers"


def finish(
    trainers: Mapping[int, Trainer],
    layout: Layout,
    flat_model: FlatModel,
    objective: Objective,
    groups: Groups,
    runtime: Runtime,
    validation: SequenceTable,
    evaluation: EvaluationSettings,
    final: Final,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate all candidates and choose the trainer with the smallest validation loss, or the average of all.

    Trainers that are not finite are in no average, and never chosen. The choice is made on other sequences than those
    that the result is reported of.

    Args:
        trainers: this rank's, by id.

    Returns:
        The result (the same on all ranks), and on the first seat the weights that were chosen: none of trainers that
        are all not finite.
    """
    control, seat = runtime.control, runtime.seat
    batch, chosen = evaluation.batch, subsets(validation.num_sequences, evaluation)

    def losses(sequences: Sequence[int]) -> dict[str, Evaluation]:
        """Every trainer's, by name. Collective."""
        sums: dict[str, Evaluation] = {}
        for trainer in trainers.values():
            part = part_of(seat, trainer.id, layout)
            sums[candidate_name(trainer.id)] = evaluate(
                flat_model, objective, trainer.result, validation, sequences, batch, part
            )
        return _exchange(control, sums)

    evaluated = losses(chosen.final)
    finite = [trainer_id for trainer_id in layout.trainers if math.isfinite(evaluated[candidate_name(trainer_id)].loss)]
    compared = losses(chosen.choice) if len(finite) > 1 else evaluated
    best = min(finite, key=lambda trainer_id: (compared[candidate_name(trainer_id)].loss, trainer_id), default=None)
    averaged = len(layout.trainers) > 1 and len(finite) > 0
    if averaged:
        shares = dict.fromkeys(finite, 1 / len(finite))
        everywhere = tuple(range(runtime.num_seats))
        average = _bring(shares, everywhere, trainers, layout, flat_model, groups, seat)
        part = Part(seat, runtime.num_seats)
        sums = {AVERAGE: evaluate(flat_model, objective, average, validation, chosen.final, batch, part)}
        evaluated |= _exchange(control, sums)
    saves_average = final is Final.average and averaged and math.isfinite(evaluated[AVERAGE].loss)
    saved = AVERAGE if saves_average else None if best is None else candidate_name(best)
    result = {
        "saved": saved,
        "trainer": None if saves_average else best,
        "validation_targets": next(iter(evaluated.values())).targets,
        "candidates": [{"name": name, **sums.figures()} for name, sums in evaluated.items()],
    }
    if best is not None and not saves_average:  # the average, evaluated last, is still where weights are brought to
        _bring({best: 1.0}, (0,), trainers, layout, flat_model, groups, seat)
    return result, flat_model.gradient if seat == 0 and saved else None


def _bring(
    shares: Mapping[int, float], needed: tuple[int, ...], trainers: Mapping[int, Trainer], layout: Layout,
    flat_model: FlatModel, groups: Groups, seat: int,
) -> torch.Tensor:  # fmt: skip
    """The trainers' results in these shares, in the flat model's gradient on the seats in `needed`."""
    wanted = transfer(0, shares, layout, needed)
    group = groups.of(wanted.ranks)
    if seat in wanted.ranks:
        anchors = {trainer_id: trainer.result for trainer_id, trainer in trainers.items()}
        combine(anchors, wanted, flat_model.gradient, group, seat)
    return flat_model.gradient


def _exchange(control: ControlPlane, sums: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Every candidate's evaluation, from the parts that the ranks evaluated; by name. Collective."""
    whole: dict[str, Evaluation] = {}
    for reply in control.exchange({"sums": {name: asdict(part) for name, part in sums.items()}}):
        for name, part in reply["sums"].items():
            whole[name] = whole.get(name, Evaluation()) + Evaluation(**part)
    return dict(sorted(whole.items(), key=lambda item: (len(item[0]), item[0])))
