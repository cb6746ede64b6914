"""The gradient of one update, in as many micro-batches as the device needs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.averaging.group import Group
from adloco_dist.averaging.shards import Shards
from adloco_dist.data.protocols import Batch
from adloco_dist.noise.statistics import num_chunks
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import FlatModel


@dataclass
class GradientWatcher:
    """Watches the first gradient of a worker in a round: sketches it as it is after each chunk of the batch."""

    sums: list[torch.Tensor] = field(default_factory=list)
    """Sketches of the accumulated gradient after each chunk."""
    num_targets: list[int] = field(default_factory=list)
    """Targets of each chunk."""
    num_sequences: int = 0

    def chunks(self, batch: Batch) -> Sequence[Batch]:
        """The chunks of the batch, cut by sequence index."""
        self.num_sequences = len(batch)
        return batch.chunks(num_chunks(len(batch)))

    def observe(self, flat_model: FlatModel, num_targets: int) -> None:
        """Sketch the gradient, which now includes a chunk of so many targets: that of the sum of the losses so far over
        the number of sequences."""
        self.num_targets.append(num_targets)
        self.sums.append(flat_model.gradient_sketch())


class GradientAverager:
    """Averages the gradients of every update over ranks while they are computed, by a flat model's wrapped module.

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
        """Surround the backward pass of a micro-batch; gradients are averaged in the last one of an update."""
        return nullcontext() if is_last else self.module.no_sync()

    def mean_targets(self, num_targets: int) -> torch.Tensor:
        """Average the number of targets of an update over the ranks: a scalar on the device. Collective."""
        total = torch.tensor([num_targets], dtype=torch.float64, device=self._flat_model.device)  # exact up to 2^53
        self._group.all_reduce(total)
        return total[0] / len(self._group.ranks)


@dataclass(frozen=True)
class AccumulatedLoss:
    """What the batch of an update came to; the gradient is in the flat model."""

    loss_sum: torch.Tensor
    """Sum of the losses over the batch's targets on this rank, a scalar on the device."""
    num_targets: int
    """Number of those targets."""
    worker_targets: int | torch.Tensor
    """Targets of the worker's whole batch, which ranks share where they hold its model together."""
    micro_batches: int
    """In which the batch was taken."""
    scale: float | torch.Tensor
    """What makes the accumulated gradient that of the mean loss over all targets, those of other ranks included."""

    @property
    def mean(self) -> torch.Tensor:
        """The worker's mean loss, or what this rank's targets contribute to it; a scalar on the device."""
        return self.loss_sum / self.worker_targets


def accumulate_gradient(
    flat_model: FlatModel, objective: Objective, batch: Batch, capacity: int | None,
    watcher: GradientWatcher | None = None, averager: GradientAverager | None = None,
) -> AccumulatedLoss:  # fmt: skip
    """Fill the flat model's gradient with that of the loss summed over `batch`, divided by its number of sequences.

    The number of targets is known only when all losses were computed, so the gradient still has to be multiplied by the
    returned scale (`scale_and_clip`); every target then has the same weight, whatever the micro-batches. Ranks that
    hold the module together share out every micro-batch; the scale turns the mean of their gradients into the sum.

    Args:
        batch: the sequences of the update, on the device.
        capacity: sequences per micro-batch; None: one micro-batch.
        watcher: its chunks are taken one after the other, each in micro-batches of its own.
    """
    flat_model.gradient.zero_()
    module = averager.module if averager else flat_model.module
    loss_sum = torch.zeros((), device=flat_model.device, dtype=flat_model.dtype)
    total_targets = num_micro_batches = 0
    chunks = watcher.chunks(batch) if watcher else [batch]
    for chunk in chunks:
        chunk_targets = 0
        micro_batches = chunk.split(micro_batch_size(len(chunk), capacity))
        num_micro_batches += len(micro_batches)
        for micro_batch in micro_batches:
            is_last = chunk is chunks[-1] and micro_batch is micro_batches[-1]
            with averager.micro_batch(is_last) if averager else nullcontext():
                sequences, counts = own_sequences(micro_batch, flat_model.shards)
                with flat_model.autocast():
                    loss, num_targets = objective.loss(module, sequences)
                if not counts:
                    loss, num_targets = 0 * loss, 0
                (loss / len(batch)).backward()
            loss_sum += loss.detach()
            chunk_targets += num_targets
        if watcher:
            watcher.observe(flat_model, chunk_targets)
        total_targets += chunk_targets
    if averager:
        scale = len(batch) / averager.mean_targets(total_targets)
        return AccumulatedLoss(loss_sum, total_targets, total_targets, num_micro_batches, scale)
    worker_targets, num_ranks = flat_model.shards.total(total_targets), len(flat_model.shards.ranks) or 1
    scale = len(batch) * num_ranks / worker_targets
    return AccumulatedLoss(loss_sum, total_targets, worker_targets, num_micro_batches, scale)


def micro_batch_size(batch: int, capacity: int | None) -> int:
    """Sequences per micro-batch for a batch in as few as `capacity` allows, all equal but the last.

    Examples:
        10 sequences with a capacity of 4 take micro-batches of 4, 4 and 2; 9 take 3, 3 and 3.
    """
    num_micro_batches = -(-batch // capacity) if capacity else 1
    return -(-batch // num_micro_batches)


def own_sequences(batch: Batch, shards: Shards) -> tuple[Batch, bool]:
    """This rank's sequences of a batch, and whether they count: all of them if it holds the module by itself.

    All ranks must compute, for they gather parameters from each other: one without a sequence takes the first, which
    does not count.
    """
    num_ranks = len(shards.ranks)
    if num_ranks < 2:
        return batch, True
    if len(batch) >= num_ranks:
        return batch.chunks(num_ranks)[shards.index], True
    is_enough = shards.index < len(batch)
    return batch.split(1)[shards.index if is_enough else 0], is_enough


def scale_and_clip(flat_model: FlatModel, scale: float | torch.Tensor, clip_norm: float | None) -> None:
    """Multiply the accumulated gradient by `scale`, then clip its norm; in place, in one multiplication."""
    if clip_norm is not None:
        norm = flat_model.gradient_norm() * scale
        scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0) * scale  # on the device: no synchronisation
    flat_model.gradient.mul_(scale)


def mean_gradient(flat_model: FlatModel, objective: Objective, batch: Batch, capacity: int | None) -> AccumulatedLoss:
    """Do as `accumulate_gradient` does, and scale the gradient to that of the mean loss."""
    done = accumulate_gradient(flat_model, objective, batch, capacity)
    scale_and_clip(flat_model, done.scale, None)
    return done
