"""The end of a run: every trainer's anchor and their average evaluated, what is to be saved brought to rank 0."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.groups import Groups
from adloco_dist.config import EvaluationSettings, Final
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.records import candidate_name, perplexity
from adloco_dist.decisions.regrouping import transfer
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.evaluate import Part, evaluate, part_of
from adloco_dist.round.merge import combine

AVERAGE = "average of all trainers"


def finish(
    trainers: Mapping[int, Trainer],
    layout: Layout,
    flat_model: FlatModel,
    groups: Groups,
    control: ControlPlane,
    validation: TokenStore,
    evaluation: EvaluationSettings,
    final: Final,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate all candidates and choose the trainer with the smallest validation loss, or the average of all.

    Args:
        trainers: this rank's, by id.

    Returns:
        The result as rank 0 wrote it (the same on all ranks), and on rank 0 the weights that were chosen.
    """
    limit, batch = evaluation.final_sequences, evaluation.batch
    sums: dict[str, tuple[float, int]] = {}
    for trainer in trainers.values():
        part = part_of(control.rank, trainer.id, layout)
        sums[candidate_name(trainer.id)] = evaluate(flat_model, trainer.anchor, validation, limit, batch, part)
    if len(layout.trainers) > 1:
        equal_shares = dict.fromkeys(layout.trainers, 1 / len(layout.trainers))
        everywhere = tuple(range(control.world_size))
        average = _bring(equal_shares, everywhere, trainers, layout, flat_model, groups)
        sums[AVERAGE] = evaluate(flat_model, average, validation, limit, batch, Part(control.rank, len(everywhere)))
    replies = control.gather({"sums": sums})
    result = control.broadcast(_result([reply["sums"] for reply in replies], layout, final) if replies else None)
    if result["trainer"] is None:
        return result, flat_model.gradient  # the average, evaluated last, is still there
    weights = _bring({result["trainer"]: 1.0}, (0,), trainers, layout, flat_model, groups)
    return result, weights if control.rank == 0 else None


def _bring(
    shares: Mapping[int, float], needed: tuple[int, ...], trainers: Mapping[int, Trainer], layout: Layout,
    flat_model: FlatModel, groups: Groups,
) -> torch.Tensor:  # fmt: skip
    """The trainers' anchors in these shares, in the flat model's gradient on the ranks in `needed`."""
    wanted = transfer(0, shares, layout, needed)
    group = groups.of(wanted.ranks)
    if dist.get_rank() in wanted.ranks:
        anchors = {id: trainer.anchor for id, trainer in trainers.items()}
        combine(anchors, wanted, flat_model.gradient, group)
    return flat_model.gradient


def _result(sums: Sequence[dict[str, tuple[float, int]]], layout: Layout, final: Final) -> dict[str, Any]:
    names = {candidate_name(trainer): trainer for trainer in layout.trainers}
    candidates = []
    num_tokens = 0
    for name in [*names, AVERAGE] if len(names) > 1 else names:
        parts = [rank_sums[name] for rank_sums in sums if name in rank_sums]
        num_tokens = sum(tokens for _, tokens in parts)
        loss = sum(loss for loss, _ in parts) / num_tokens
        candidates.append({"name": name, "validation_loss": loss, "validation_perplexity": perplexity(loss)})
    # A loss that is not a number is the worst, not the smallest.
    trained = [candidate for candidate in candidates if candidate["name"] in names]
    saved = min(trained, key=lambda candidate: (candidate["validation_loss"] != candidate["validation_loss"],
                                                candidate["validation_loss"]))  # fmt: skip
    if final is Final.average and len(names) > 1:
        saved = candidates[-1]
    return {
        "saved": saved["name"],
        "trainer": names.get(saved["name"]),
        "validation_tokens": num_tokens,
        "candidates": candidates,
    }
