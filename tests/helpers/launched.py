"""What the launcher trains for tests that compare it with other ways to train the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.pool.flat_model import FlatModel
from helpers.support import FOUR_TRAINERS, small_module, small_settings, small_store, train_small_pool
from helpers.tables import deal

PLAIN = ("inner.schedule=constant", "inner.weight_decay=0.1", "evaluation.every=null")


def batches(num_updates: int, total_batch: int) -> list[torch.Tensor]:
    """What one trainer reads: the sequences of each update, (B, L + 1), in the order of its shard."""
    store = small_store()
    (shard,) = deal(store.num_sequences, 1, seed=0)
    return [store.batch(shard.peek(update * total_batch, total_batch)).tokens for update in range(num_updates)]


def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


def decay_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def new_adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(decay_groups(module, 0.1), lr=5e-3, betas=(0.9, 0.95), foreach=False)]


@dataclass(frozen=True)
class ClippedUpdates:
    """A worker's updates on its part of what the trainer reads."""

    data: list[torch.Tensor]
    local_batch: int

    def __call__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], worker: int, number: int
    ) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(module, self.data[number][worker * self.local_batch : (worker + 1) * self.local_batch]).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()


def train_and_unflatten(runtime: Runtime, *overrides: str) -> list[np.ndarray]:
    """The first trainer's anchor after training, as the module's parameters."""
    overrides = (*PLAIN, "pool.trainers=1", *overrides)
    anchor = train_small_pool(runtime, *FOUR_TRAINERS, *overrides)["anchors"][0]
    settings = small_settings(*FOUR_TRAINERS, *overrides)
    module = small_module(settings)
    flat_model = FlatModel(module, runtime.device, settings.precision)
    flat_model.point_at(torch.from_numpy(anchor))
    return [parameter.numpy() for parameter in parameters(module)]
