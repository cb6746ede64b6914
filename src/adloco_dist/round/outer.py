"""The outer step: pseudo-gradients averaged over a trainer's workers, one step of the outer optimizer.

Delta = mean over the trainer's workers of (x - w_m), then SGD on the anchor x with Delta as its gradient
(DiLoCo, 2311.08105, Algorithm 1, lines 12 to 14). Buffers that training changes are no parameters: the anchor's become
the mean of the workers'.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from adloco_dist.config import OuterSettings
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.phases import wait_for

CPU_CHUNK_ELEMENTS = 1 << 17
GPU_CHUNK_ELEMENTS = 1 << 22
"""The vectors are worked through in chunks, so that no second vector of the model's size is needed. On a CPU each
thread's part of a chunk stays in its cache from one operation to the next; on a GPU a chunk is worth the 5 us that
launching an operation costs, and outer state in CPU memory passes through."""


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


def outer(trainer: Trainer, group: dist.ProcessGroup | None) -> OuterStep:
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
        dist.all_reduce(payload, group=group)
    num_finite = int(payload[-1])
    _step(trainer, num_finite)
    for worker, was_finite in zip(trainer.workers, finite, strict=True):
        if not was_finite:
            worker.reset_optimizer()
    norm = _pseudo_gradient_norm(trainer) if num_finite else 0.0
    spoilt = [worker.id for worker, was_finite in zip(trainer.workers, finite, strict=True) if not was_finite]
    wait_for(flat_model.device)  # the CPU may read what was copied into its memory
    return OuterStep(num_finite, spoilt, norm, ring_bytes_sent(payload, group))


def adopt(trainer: Trainer, group: dist.ProcessGroup | None) -> OuterStep:
    """What algorithm=ddp does instead: its workers are equal already, so the anchor becomes the weights.

    But for buffers that training changes, which followed each rank's own sequences: they are averaged. Parameters that
    are not finite are so on all ranks, for gradients are averaged; all of them go on from the anchor then, with fresh
    moments.
    """
    (worker,) = trainer.workers
    flat_model, boundary = trainer.flat_model, trainer.flat_model.buffer_boundary
    is_finite = bool(torch.isfinite(worker.weights[:boundary].sum()))
    contributes = bool(torch.isfinite(worker.weights.sum()))
    _sum_differences(trainer, [contributes])
    buffers = flat_model.payload[boundary:]
    buffers[-1] = contributes
    bytes_sent = 0
    if group is not None and boundary < flat_model.num_elements:
        dist.all_reduce(buffers, group=group)
        bytes_sent = ring_bytes_sent(buffers, group)
    num_contributing = int(buffers[-1])
    if is_finite:
        trainer.anchor[:boundary].copy_(worker.weights[:boundary])
        if num_contributing:
            trainer.anchor[boundary:].copy_(buffers[:-1].mul_(1 / num_contributing))
        worker.weights[boundary:].copy_(trainer.anchor[boundary:])
    else:
        worker.weights.copy_(trainer.anchor)
        worker.reset_optimizer()
    spoilt = [] if contributes else [worker.id]
    return OuterStep(int(is_finite), spoilt, _pseudo_gradient_norm(trainer), bytes_sent)


def ring_bytes_sent(payload: torch.Tensor, group: dist.ProcessGroup | None) -> int:
    """Bytes that each rank sends in a ring all-reduce over n ranks: 2 (n - 1) / n of the payload."""
    num_ranks = 1 if group is None else dist.get_world_size(group)
    return 2 * (num_ranks - 1) * payload.nbytes // num_ranks


def sgd_step(anchor: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, outer: OuterSettings) -> None:
    """Take the step of torch.optim.SGD (dampening 0) in place, in operations that round alike on every device.

    A trainer's ranks may compute on CPUs and on GPUs, and must come to the same bits. One operation that multiplies and
    adds (torch's fused SGD, `add_` with an alpha) rounds twice on a CPU and once on a GPU.

    Args:
        anchor, gradient: (n,) each, on one device.
        momentum: (n,), zeros before the first step; None where `outer.momentum` is 0.
    """
    if momentum is None:
        update = gradient * outer.lr
    else:
        momentum.mul_(outer.momentum).add_(gradient)
        update = (momentum * outer.momentum).add_(gradient).mul_(outer.lr) if outer.nesterov else momentum * outer.lr
    anchor.sub_(update)


def _sum_differences(trainer: Trainer, finite: list[bool]) -> None:
    """Fill the flat model's gradient with the sum of x - w_m over this rank's finite workers; of buffers, of w_m."""
    device, gradient = trainer.flat_model.device, trainer.flat_model.gradient
    contributors = [worker.weights for worker, is_finite in zip(trainer.workers, finite, strict=True) if is_finite]
    buffers = gradient[trainer.flat_model.buffer_boundary :].zero_()
    for weights in contributors:
        buffers.add_(weights[trainer.flat_model.buffer_boundary :].to(device))
    if not contributors:
        gradient.zero_()
        return
    for part in _chunks(trainer):
        anchor = trainer.anchor[part].to(device, non_blocking=True)
        for index, weights in enumerate(contributors):
            # Differences first: x - w is small beside x, and a sum of weights would round it away.
            addend = weights[part].to(device, non_blocking=True)
            if index == 0:
                torch.sub(anchor, addend, out=gradient[part])
            else:
                gradient[part].add_(anchor - addend)


def _step(trainer: Trainer, num_finite: int) -> None:
    """Make the summed differences their mean, take the outer step, and restart this rank's workers from the anchor.

    The step is computed on the rank's device. Outer state in pinned CPU memory comes and goes in chunks, in the order
    of the device's work, without waiting for it.
    """
    device, is_elsewhere = trainer.flat_model.device, trainer.anchor.device != trainer.flat_model.device
    for part in _chunks(trainer):
        homes = [vector[part] for vector in trainer.outer_vectors]
        anchor, *momentum = [home.to(device, non_blocking=True) for home in homes]
        if num_finite:
            # Times the reciprocal: a GPU divides by a number of the host in that way, a CPU does not.
            gradient = trainer.flat_model.gradient[part].mul_(1 / num_finite)
            sgd_step(anchor, momentum[0] if momentum else None, gradient, trainer.outer)
            if is_elsewhere:
                for home, new in zip(homes, (anchor, *momentum), strict=True):
                    home.copy_(new, non_blocking=True)
        for worker in trainer.workers:
            worker.weights[part].copy_(anchor, non_blocking=True)
    buffers = slice(trainer.flat_model.buffer_boundary, None)
    if num_finite:
        trainer.anchor[buffers].copy_(trainer.flat_model.gradient[buffers].mul_(1 / num_finite))
    for worker in trainer.workers:
        worker.weights[buffers].copy_(trainer.anchor[buffers])


def _pseudo_gradient_norm(trainer: Trainer) -> float:
    return float(torch.linalg.vector_norm(trainer.flat_model.gradient[: trainer.flat_model.buffer_boundary]))


def _chunks(trainer: Trainer) -> Iterator[slice]:
    """Of the parameters; the buffers behind them are few."""
    end, device = trainer.flat_model.buffer_boundary, trainer.flat_model.device
    size = CPU_CHUNK_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else GPU_CHUNK_ELEMENTS
    for start in range(0, end, size):
        yield slice(start, min(start + size, end))
