"""The inner phase: every worker takes its updates from its trainer's anchor; no communication."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.config import Settings
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.plan import RoundPlan
from adloco_dist.decisions.schedule import batch_scale, learning_rate
from adloco_dist.decisions.switch import least, pass_size
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.round.estimate import GradientEstimator
from adloco_dist.round.gradient import accumulate_gradient
from adloco_dist.round.phases import timed


@dataclass
class InnerResult:
    """What a trainer's workers on this rank did."""

    loss_sum: float = 0.0
    """Sum over the workers of their mean training loss, in nats per token."""
    pass_seconds_per_sequence: float = 0.0
    """Summed over the workers, taken from their last updates; 0 unless switch.n=auto wants to know."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""


def inner(
    trainer: Trainer, module: nn.Module, store: TokenStore, plan: RoundPlan, settings: Settings,
    estimator: GradientEstimator | None = None,
) -> InnerResult:  # fmt: skip
    """The updates of each of the trainer's workers on this rank, one worker after the other.

    Args:
        module: what computes the logits: the flat model's module, or DistributedDataParallel around it.
        estimator: watches every worker's first gradient; None: nothing is measured.
    """
    result = InnerResult()
    for worker in trainer.workers:
        trainer.flat_model.point_at(worker.weights)
        if settings.inner.reset_each_round:
            worker.reset_optimizer()
        _take_updates(worker, trainer, module, store, plan, settings, estimator, result)
    trainer.shard.advance(plan.updates * plan.total_batch(trainer.id))
    return result


def _take_updates(
    worker: Worker, trainer: Trainer, module: nn.Module, store: TokenStore, plan: RoundPlan, settings: Settings,
    estimator: GradientEstimator | None, result: InnerResult,
) -> None:  # fmt: skip
    clip_norm, batch, gradient = settings.inner.clip_norm, plan.batches[trainer.id], trainer.flat_model.gradient
    rate_scale = batch_scale(settings, batch.local_batch)
    loss_sum = torch.zeros((), device=gradient.device, dtype=gradient.dtype)
    seconds: dict[str, float] = {}
    for update in range(plan.updates):
        offset = update * plan.total_batch(trainer.id) + worker.id * batch.local_batch
        tokens = _to_device(store.sequences(trainer.shard.peek(offset, batch.local_batch)), gradient.device)
        is_timed = settings.switch.n == "auto" and update == plan.updates - 1
        with timed(seconds, "passes", gradient.device) if is_timed else nullcontext():
            # Seeded by who and when, never by where: hosting does not change a random number.
            seed = (settings.seed, trainer.id, worker.id, plan.round, update)
            watching = estimator if update == 0 else None
            loss_sum += _update_gradient(
                worker.id, trainer.flat_model, module, tokens, batch.batch_limit, seed, watching, result.notes
            )
        if clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0))  # on the device: no synchronisation
        worker.set_learning_rate(learning_rate(settings.inner, plan.progress, update) * rate_scale)
        worker.optimizer.step()
    result.loss_sum += float(loss_sum) / plan.updates
    result.pass_seconds_per_sequence += seconds.get("passes", 0.0) / batch.local_batch


def _update_gradient(
    worker: int, flat_model: FlatModel, module: nn.Module, tokens: torch.Tensor, limit: int | None,
    seed: tuple[int, ...], estimator: GradientEstimator | None, notes: list[str],
) -> torch.Tensor:  # fmt: skip
    """The gradient of one update's batch; where memory runs out, the same batch again in passes of half the size.

    Returns:
        The batch's mean loss, a scalar on the device.

    Raises:
        torch.OutOfMemoryError: not even one sequence fits (RuntimeError where it is the CPU's memory).
    """
    while True:
        size = pass_size(len(tokens), least(limit, flat_model.capacity))
        try:
            _seed(*seed)
            if estimator:
                estimator.start(worker)
            return accumulate_gradient(flat_model, module, tokens, size, estimator)
        except RuntimeError as error:
            # Other ranks of DistributedDataParallel wait in the pass that failed: it cannot be repeated.
            if not is_out_of_memory(error) or size == 1 or isinstance(module, DistributedDataParallel):
                raise
        # Outside of the handler: the error's traceback holds the activations of the failed pass.
        flat_model.capacity = size // 2
        free_device_memory()
        notes.append(
            f"out of memory with {size} sequences in a pass: the update is repeated, and goes on, in passes of at most "
            f"{size // 2}"
        )


def _seed(*key: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


def _to_device(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tokens
    return tokens.pin_memory().to(device, non_blocking=True)
