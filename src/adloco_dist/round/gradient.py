"""The gradient of one update, in as many passes as the device needs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.cluster.groups import Group
from adloco_dist.data.batch import Batch
from adloco_dist.decisions.switch import pass_size
from adloco_dist.losses import Losses, losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.worker import Worker


class GradientWatcher(Protocol):
    """Sees a gradient grow."""

    def chunks(self, batch: Batch) -> Sequence[Batch]:
        """The pieces of the batch, cut by sequence index, after each of which it wants to see the gradient."""
        ...

    def observe(self, chunk: Batch) -> None:
        """The flat model's gradient, of the mean loss over the whole batch, now includes `chunk`."""


def accumulate_gradient(
    flat_model: FlatModel, module: nn.Module, batch: Batch, capacity: int | None,
    watcher: GradientWatcher | None = None, losses: Losses = losses,
) -> torch.Tensor:  # fmt: skip
    """Fill the flat model's gradient with that of the mean loss of `batch`, in as few passes as `capacity` allows.

    Args:
        module: what computes the logits: the flat model's module, or DistributedDataParallel around it.
        batch: on the device; every target has the same weight, whatever the passes.
        capacity: sequences per pass; None: one pass.
        watcher: its chunks are taken one after the other, each in passes of its own.
        losses: of the module and a batch, maybe compiled.

    Returns:
        The mean loss in nats per target, a scalar on the device.
    """
    flat_model.gradient.zero_()
    mean_loss = torch.zeros((), device=flat_model.device, dtype=flat_model.dtype)
    for chunk in watcher.chunks(batch) if watcher else [batch]:
        parts = chunk.split(pass_size(len(chunk), capacity))
        for part in parts:
            with _averaging(module, is_last=part is parts[-1]):
                with flat_model.autocast():
                    loss = losses(module, part).sum() / batch.total_targets
                loss.backward()
            mean_loss += loss.detach()
        if watcher:
            watcher.observe(chunk)
    return mean_loss


def data_parallel(flat_model: FlatModel, worker: Worker, group: Group | None) -> nn.Module:
    """The module of algorithm=ddp: gradients are averaged over `group` in every backward pass."""
    flat_model.point_at(worker.weights)
    if group is None:
        return flat_model.module
    return DistributedDataParallel(
        flat_model.module,
        device_ids=[flat_model.device.index] if flat_model.device.type == "cuda" else None,
        process_group=group.process_group,
        # All ranks built the same module, and its buffers are averaged once a round: nothing but gradients travels.
        init_sync=False,
        broadcast_buffers=False,
    )


def _averaging(module: nn.Module, is_last: bool) -> AbstractContextManager[object]:
    """DistributedDataParallel averages in the last pass of an update only; in the others gradients add up locally."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()
