"""The inner phase: every worker takes H updates from its trainer's anchor; no communication.

Shape suffixes: B sequences, L tokens of a sequence that are predicted.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.config import Settings
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.plan import RoundPlan
from adloco_dist.decisions.schedule import learning_rate
from adloco_dist.decisions.switch import pass_size
from adloco_dist.models import token_losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker


def inner(trainer: Trainer, module: nn.Module, store: TokenStore, plan: RoundPlan, settings: Settings) -> float:
    """H updates of each of the trainer's workers on this rank, one worker after the other.

    Args:
        module: what computes the logits: the flat model's module, or DistributedDataParallel around it.

    Returns:
        The sum over the workers of their mean training loss, in nats per token.
    """
    loss_sum = 0.0
    for worker in trainer.workers:
        trainer.flat_model.point_at(worker.weights)
        if settings.inner.reset_each_round:
            worker.reset_optimizer()
        loss_sum += _take_updates(worker, trainer, module, store, plan, settings)
    trainer.shard.advance(settings.algorithm.updates_per_round * plan.total_batch(trainer.id))
    return loss_sum


def data_parallel(flat_model: FlatModel, worker: Worker, group: dist.ProcessGroup | None) -> nn.Module:
    """The module of algorithm=ddp: gradients are averaged over `group` in every backward pass."""
    flat_model.point_at(worker.weights)
    if group is None:
        return flat_model.module
    return DistributedDataParallel(
        flat_model.module,
        device_ids=[flat_model.device.index] if flat_model.device.type == "cuda" else None,
        process_group=group,
        # All ranks built the same module, and its buffers are constants: nothing but gradients needs to travel.
        init_sync=False,
        broadcast_buffers=False,
    )


def _take_updates(
    worker: Worker, trainer: Trainer, module: nn.Module, store: TokenStore, plan: RoundPlan, settings: Settings
) -> float:
    updates, clip_norm = settings.algorithm.updates_per_round, settings.inner.clip_norm
    local_batch, total_batch = plan.local_batches[trainer.id], plan.total_batch(trainer.id)
    gradient = trainer.flat_model.gradient
    loss_sum = torch.zeros((), device=gradient.device, dtype=gradient.dtype)
    for update in range(updates):
        # Seeded by who and when, never by where: hosting does not change a random number.
        _seed(settings.seed, trainer.id, worker.id, plan.round, update)
        ids = trainer.shard.peek(update * total_batch + worker.id * local_batch, local_batch)
        tokens = _to_device(store.sequences(ids), gradient.device)
        loss_sum += accumulate_gradient(trainer.flat_model, module, tokens, settings.batching.capacity)
        if clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0))  # on the device: no synchronisation
        worker.set_learning_rate(learning_rate(settings.inner, plan.progress, update))
        worker.optimizer.step()
    return float(loss_sum) / updates


def accumulate_gradient(
    flat_model: FlatModel, module: nn.Module, tokens: torch.Tensor, capacity: int | None
) -> torch.Tensor:
    """Fill the flat model's gradient with that of the mean loss of `tokens`, in as few passes as `capacity` allows.

    Args:
        tokens: (B, L + 1) ids; every sequence has the same weight, whatever the passes.
        capacity: sequences per pass; None: one pass.

    Returns:
        The mean loss in nats per token, a scalar on the device.
    """
    flat_model.gradient.zero_()
    num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
    mean_loss = torch.zeros((), device=tokens.device, dtype=flat_model.dtype)
    parts = tokens.split(pass_size(tokens.shape[0], capacity))
    for part in parts:
        with _averaging(module, is_last=part is parts[-1]):
            with flat_model.autocast():
                loss = token_losses(module, part).sum() / num_targets
            loss.backward()
        mean_loss += loss.detach()
    return mean_loss


def _averaging(module: nn.Module, is_last: bool) -> AbstractContextManager[object]:
    """DistributedDataParallel averages in the last pass of an update only; in the others gradients add up locally."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return nullcontext()


def _seed(*key: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


def _to_device(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tokens
    return tokens.pin_memory().to(device, non_blocking=True)
