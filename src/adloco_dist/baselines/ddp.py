"""algorithm=ddp: torch's DistributedDataParallel averages gradients at every update; one worker per rank."""

from dataclasses import replace

import torch

from adloco_dist.averaging.group import Group, ring_bytes_sent
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.pool.gradient import GradientAverager
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer

TARGETS_BYTES = 8
"""What travels in every update beside gradients: a rank's number of targets, in fp64."""


def data_parallel_slot(slot: ComputeSlot, trainer: Trainer, group: Group | None) -> ComputeSlot:
    """The slot with its module wrapped, which points at the weights of this rank's only worker; of one rank, as it is.

    Called once, when memory has been measured.
    """
    (worker,) = trainer.workers
    slot.flat_model.point_at(worker.weights)
    return slot if group is None else replace(slot, averager=GradientAverager(slot.flat_model, group))


class DataParallelTrainer(Trainer):
    """The trainer whose workers are equal after every update."""

    def average(self, fragment: int, group: Group | None, in_four_bits: bool) -> OuterStepReport:
        """Make the weights, which are equal on all ranks already, the trainer's anchor.

        Buffers that training changes followed each rank's own sequences: they are averaged. Parameters that are
        non-finite are so on all ranks, for gradients are averaged; all of them restart from the anchor then, with fresh
        moments.
        """
        (worker,) = self.workers
        flat_model, boundary = self.flat_model, self.flat_model.buffer_boundary
        num_updates, num_ranks = worker.updates_done, 1 if group is None else len(group.ranks)
        is_finite = bool(torch.isfinite(worker.weights[:boundary].sum()))
        contributes = bool(torch.isfinite(worker.weights.sum()))
        step = flat_model.gradient.copy_(self.anchor).sub_(worker.weights)[:boundary]
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
        if is_finite:
            self.anchor[:boundary].copy_(worker.weights[:boundary])
            self._buffers.step(buffers[:-1], int(buffers[-1]))
            self._buffers.restart(self.workers)
        else:
            worker.weights.copy_(self.anchor)
            worker.reset_optimizer()
        nonfinite = [] if contributes else [worker.id]
        return OuterStepReport(
            int(is_finite), nonfinite, norm, bytes_sent=buffer_bytes, gradient_bytes_sent=num_updates * gradient_bytes
        )
