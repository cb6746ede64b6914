"""The end of a run: every trainer's anchor and their average evaluated, the best of the trainers gathered."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import EvaluationSettings
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.report import perplexity
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.evaluate import Part, evaluate, part_of
from adloco_dist.round.merge import combine

AVERAGE = "average of all trainers"


def finish(
    trainers: Sequence[Trainer],
    layout: Layout,
    flat_model: FlatModel,
    world: dist.ProcessGroup | None,
    control: ControlPlane,
    validation: TokenStore,
    evaluation: EvaluationSettings,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate all candidates and choose the trainer with the smallest validation loss.

    Returns:
        The result as rank 0 wrote it (the same on all ranks), and on rank 0 the weights that were chosen.
    """
    limit, batch = evaluation.final_sequences, evaluation.batch
    sums: dict[str, tuple[float, int]] = {}
    for trainer in trainers:
        part = part_of(control.rank, trainer.id, layout)
        sums[_name(trainer.id)] = evaluate(flat_model, trainer.anchor, validation, limit, batch, part)
    if len(layout.trainers) > 1:
        equal_shares = dict.fromkeys(layout.trainers, 1 / len(layout.trainers))
        average = combine(trainers, equal_shares, layout, flat_model, world)
        part = Part(control.rank, control.world_size)
        sums[AVERAGE] = evaluate(flat_model, average, validation, limit, batch, part)
    replies = control.gather({"sums": sums})
    result = control.broadcast(_result([reply["sums"] for reply in replies], layout) if replies else None)
    return result, _bring_to_rank_0(result["trainer"], trainers, layout, flat_model, world)


def _bring_to_rank_0(
    chosen: int, trainers: Sequence[Trainer], layout: Layout, flat_model: FlatModel, world: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """The anchor of trainer `chosen`; it travels only if rank 0 does not hold it already."""
    if 0 in layout.ranks(chosen):
        return next((trainer.anchor for trainer in trainers if trainer.id == chosen), None)
    return combine(trainers, {chosen: 1.0}, layout, flat_model, world)


def _name(trainer: int) -> str:
    return f"trainer {trainer}"


def _result(sums: Sequence[dict[str, tuple[float, int]]], layout: Layout) -> dict[str, Any]:
    names = {_name(trainer): trainer for trainer in layout.trainers}
    candidates = []
    num_tokens = 0
    for name in [*names, AVERAGE] if len(names) > 1 else names:
        parts = [rank_sums[name] for rank_sums in sums if name in rank_sums]
        num_tokens = sum(tokens for _, tokens in parts)
        loss = sum(loss for loss, _ in parts) / num_tokens
        candidates.append({"name": name, "validation_loss": loss, "validation_perplexity": perplexity(loss)})
    # A loss that is not a number is the worst, not the smallest.
    trained = [candidate for candidate in candidates if candidate["name"] in names]
    best = min(trained, key=lambda candidate: (candidate["validation_loss"] != candidate["validation_loss"],
                                               candidate["validation_loss"]))  # fmt: skip
    return {
        "saved": best["name"],
        "trainer": names[best["name"]],
        "validation_tokens": num_tokens,
        "candidates": candidates,
    }
