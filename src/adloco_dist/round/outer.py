"""The outer step: pseudo-gradients averaged over a trainer's workers, one step of the outer optimizer.

Delta = mean over the trainer's workers of (x - w_m), then SGD on the anchor x with Delta as its gradient
(DiLoCo, 2311.08105, Algorithm 1, lines 12 to 14).
"""

from dataclasses import dataclass

import torch

from adloco_dist.cluster.groups import Group
from adloco_dist.pool.trainer import Trainer

CHUNK_ELEMENTS = 1 << 20
"""Differences are taken in chunks, so that no second vector of the model's size is needed."""


@dataclass(frozen=True)
class OuterStep:
    """What one outer step did."""

    num_finite: int
    """Workers of the whole trainer whose weights were finite and contributed."""
    spoilt: list[int]
    """Workers on this rank that were not finite."""
    pseudo_gradient_norm: float
    bytes_sent: int
    """By this rank."""


def outer(trainer: Trainer, group: Group | None) -> OuterStep:
    """One outer step of a trainer; every rank of `group` takes the same step, and nobody broadcasts.

    A worker whose weights or losses are not finite contributes nothing and restarts from the new anchor with fresh
    moments; the number of the others travels in the payload. If none is left, the anchor stays.
    """
    flat_model = trainer.flat_model
    # Loss and gradients that are not finite leave weights that are not, and so do differences.
    finite = [
        bool(torch.isfinite(worker.weights.sum()) and torch.isfinite(worker.loss_sum)) for worker in trainer.workers
    ]
    _sum_differences(trainer, finite)
    payload = flat_model.payload
    payload[-1] = sum(finite)
    if group is not None:
        group.all_reduce(payload)
    num_finite = int(payload[-1])
    if num_finite:
        flat_model.gradient.div_(num_finite)
        _step(trainer, flat_model.gradient)
    for worker, was_finite in zip(trainer.workers, finite, strict=True):
        worker.weights.copy_(trainer.anchor)
        if not was_finite:
            worker.reset_optimizer()
    norm = float(torch.linalg.vector_norm(flat_model.gradient)) if num_finite else 0.0
    spoilt = [worker.id for worker, was_finite in zip(trainer.workers, finite, strict=True) if not was_finite]
    return OuterStep(num_finite, spoilt, norm, ring_bytes_sent(payload, group))


def adopt(trainer: Trainer) -> OuterStep:
    """What algorithm=ddp does instead: its workers are equal already, so the anchor becomes the weights.

    Weights that are not finite are so on all ranks, for gradients are averaged; all of them go on from the anchor then,
    with fresh moments.
    """
    (worker,) = trainer.workers
    is_finite = bool(torch.isfinite(worker.weights.sum()))
    _sum_differences(trainer, [is_finite])
    if is_finite:
        trainer.anchor.copy_(worker.weights)
    else:
        worker.weights.copy_(trainer.anchor)
        worker.reset_optimizer()
    norm = float(torch.linalg.vector_norm(trainer.flat_model.gradient))
    return OuterStep(int(is_finite), [] if is_finite else [worker.id], norm, 0)


def ring_bytes_sent(payload: torch.Tensor, group: Group | None) -> int:
    """Bytes that each rank sends in a ring all-reduce over n ranks: 2 (n - 1) / n of the payload."""
    num_ranks = 1 if group is None else len(group.ranks)
    return 2 * (num_ranks - 1) * payload.nbytes // num_ranks


def _sum_differences(trainer: Trainer, finite: list[bool]) -> None:
    """Fill the flat model's gradient with the sum of x - w_m over this rank's finite workers."""
    anchor, gradient = trainer.anchor, trainer.flat_model.gradient
    contributors = [worker.weights for worker, is_finite in zip(trainer.workers, finite, strict=True) if is_finite]
    if not contributors:
        gradient.zero_()
    for start in range(0, len(anchor), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        anchor_part = anchor[part].to(gradient.device, non_blocking=True)
        for index, weights in enumerate(contributors):
            # Differences first: x - w is small beside x, and a sum of weights would round it away.
            weights_part = weights[part].to(gradient.device, non_blocking=True)
            if index == 0:
                torch.sub(anchor_part, weights_part, out=gradient[part])
            else:
                gradient[part] += anchor_part - weights_part


def _step(trainer: Trainer, pseudo_gradient: torch.Tensor) -> None:
    # An anchor in CPU memory takes its step there, on a copy of the averaged pseudo-gradient.
    trainer.anchor.grad = pseudo_gradient.to(trainer.anchor.device)
    trainer.outer_optimizer.step()
    trainer.anchor.grad = None
