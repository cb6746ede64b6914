"""algorithm=ddp: torch's DistributedDataParallel averages gradients at every update; one worker per rank."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.averaging.group import Group, ring_bytes_sent
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer

TARGETS_BYTES = 8
"""What travels in every update beside gradients: a rank's number of targets, in fp64."""


class DataParallel:
    """The `Algorithm` whose workers are equal after every update."""

    def prepare(self, slot: ComputeSlot, trainer: Trainer, group: Group | None) -> ComputeSlot:
        """Wrap the slot's module, which points at the weights of this rank's only worker."""
        (worker,) = trainer.workers
        slot.flat_model.point_at(worker.weights)
        return slot if group is None else replace(slot, averager=DataParallelAverager(slot.flat_model, group))

    def average(self, trainer: Trainer, group: Group | None, fragment: int) -> OuterStepReport:
        """Make the weights, which are equal on all ranks already, the trainer's anchor.

        Buffers that training changes followed each rank's own sequences: they are averaged. Parameters that are
        non-finite are so on all ranks, for gradients are averaged; all of them restart from the anchor then, with fresh
        moments.
        """
        (worker,) = trainer.workers
        flat_model, boundary = trainer.flat_model, trainer.flat_model.buffer_boundary
        num_updates, num_ranks = worker.updates_done, 1 if group is None else len(group.ranks)
        is_finite = bool(torch.isfinite(worker.weights[:boundary].sum()))
        contributes = bool(torch.isfinite(worker.weights.sum()))
        step = flat_model.gradient.copy_(trainer.anchor).sub_(worker.weights)[:boundary]
        norm = float(torch.linalg.vector_norm(step)) if is_finite else 0.0
        gradient_bytes = ring_bytes_sent(step.nbytes + TARGETS_BYTES, num_ranks)
        buffers = flat_model.payload[boundary:].zero_()
        if contributes:
            buffers[:-1] = worker.weights[boundary:]
        buffers[-1] = contributes
        buffer_bytes = 0
        if group is not None and boundary < flat_model.num_elements:
            group.all_reduce(buffers)
            buffer_bytes = ring_bytes_sent(buffers.nbytes, num_ranks)
        num_contributing = int(buffers[-1])
        if is_finite:
            trainer.anchor[:boundary].copy_(worker.weights[:boundary])
            if num_contributing:
                trainer.anchor[boundary:].copy_(buffers[:-1].mul_(1 / num_contributing))
            worker.weights[boundary:].copy_(trainer.anchor[boundary:])
        else:
            worker.weights.copy_(trainer.anchor)
            worker.reset_optimizer()
        nonfinite = [] if contributes else [worker.id]
        return OuterStepReport(
            int(is_finite), nonfinite, norm, bytes_sent=buffer_bytes, gradient_bytes_sent=num_updates * gradient_bytes
        )


class DataParallelAverager:
    """The `GradientAverager` around a flat model's module.

    Ranks divide their loss sums by their numbers of sequences, which are equal, and DistributedDataParallel averages
    that; the mean number of targets then makes every target of the trainer's batch weigh the same.
    """

    def __init__(self, flat_model: FlatModel, group: Group) -> None:
        self._flat_model = flat_model
        self._group = group
        self.module = DistributedDataParallel(
            flat_model.module,
            device_ids=[flat_model.device.index] if flat_model.device.type == "cuda" else None,
            process_group=group.process_group,
            # All ranks built the same module, and its buffers are averaged once a round: only gradients travel.
            init_sync=False,
            broadcast_buffers=False,
        )

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self.module.no_sync()

    def mean_targets(self, num_targets: int) -> torch.Tensor:
        total = torch.tensor([num_targets], dtype=torch.float64, device=self._flat_model.device)  # exact up to 2^53
        self._group.all_reduce(total)
        return total[0] / len(self._group.ranks)
