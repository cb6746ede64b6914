"""The end of a run: every trainer's anchor and their average evaluated, what is to be saved brought to rank 0."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adloco_dist.cluster.control import ControlPlane
from adloco_dist.config import EvaluationSettings, Final
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.records import perplexity
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
    final: Final,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate all candidates and choose the trainer with the smallest validation loss, or the average of all.

    Returns:
        The result as rank 0 wrote it (the same on all ranks), and on rank 0 the weights that were chosen.
    """
    limit, batch = evaluation.final_sequences, evaluation.batch
    equal_shares = dict.fromkeys(layout.trainers, 1 / len(layout.trainers))
    sums: dict[str, tuple[float, int]] = {}
    for trainer in trainers:
        part = part_of(control.rank, trainer.id, layout)
        sums[_name(trainer.id)] = evaluate(flat_model, trainer.anchor, validation, limit, batch, part)
    if len(layout.trainers) > 1:
        combine(_contributions(trainers, layout, equal_shares, control.rank), flat_model.gradient, world)
        part = Part(control.rank, control.world_size)
        sums[AVERAGE] = evaluate(flat_model, flat_model.gradient, validation, limit, batch, part)
    replies = control.gather({"sums": sums})
    result = control.broadcast(_result([reply["sums"] for reply in replies], layout, final) if replies else None)
    shares = equal_shares if result["trainer"] is None else {result["trainer"]: 1.0}
    return result, _bring_to_rank_0(shares, trainers, layout, flat_model, control.rank, world)


def _bring_to_rank_0(
    shares: Mapping[int, float], trainers: Sequence[Trainer], layout: Layout, flat_model: FlatModel, rank: int,
    world: dist.ProcessGroup | None,
) -> torch.Tensor | None:  # fmt: skip
    """The trainers' anchors in these shares; one alone travels only if rank 0 does not hold it already."""
    if len(shares) == 1 and 0 in layout.ranks(next(iter(shares))):
        return next((trainer.anchor for trainer in trainers if trainer.id in shares), None)
    combine(_contributions(trainers, layout, shares, rank), flat_model.gradient, world)
    return flat_model.gradient


def _contributions(
    trainers: Sequence[Trainer], layout: Layout, shares: Mapping[int, float], rank: int
) -> list[tuple[float, torch.Tensor]]:
    """This rank's part of a sum over trainers, each of which its lowest rank contributes."""
    return [
        (shares[trainer.id], trainer.anchor)
        for trainer in trainers
        if trainer.id in shares and layout.ranks(trainer.id)[0] == rank
    ]


def _name(trainer: int) -> str:
    return f"trainer {trainer}"


def _result(sums: Sequence[dict[str, tuple[float, int]]], layout: Layout, final: Final) -> dict[str, Any]:
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
