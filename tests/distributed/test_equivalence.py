"""Invariants 5 and 9: special cases of the pool are algorithms that everybody knows, number for number."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import SEQUENCE_LENGTH, small_module, small_settings, small_store, train_small_pool
from transformers import PreTrainedModel

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.data.batch import Batch
from adloco_dist.data.shards import deal
from adloco_dist.losses import losses
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.testing.processes import run_ranks

PLAIN = ("inner.schedule=constant", "inner.weight_decay=0.1", "evaluation.every_rounds=null")


def batches(num_updates: int, total_batch: int) -> list[torch.Tensor]:
    """What one trainer reads: the sequences of each update, (B, L + 1), in the order of its shard."""
    store = small_store()
    (shard,) = deal(store.num_sequences, 1, seed=0)
    return [store.batch(shard.peek(update * total_batch, total_batch)).tokens for update in range(num_updates)]


def loss(module: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])


def parameters(module: PreTrainedModel) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


def decay_groups(module: PreTrainedModel, decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def reference_diloco(num_rounds: int, num_workers: int, updates: int, local_batch: int) -> list[torch.Tensor]:
    """DiLoCo as published (2311.08105, Algorithm 1), on modules and torch optimizers alone."""
    anchor = small_module(small_settings()).double()
    replicas = [copy.deepcopy(anchor) for _ in range(num_workers)]
    inner = [torch.optim.AdamW(decay_groups(w, 0.1), lr=5e-3, betas=(0.9, 0.95), foreach=False) for w in replicas]
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    data = batches(num_rounds * updates, num_workers * local_batch)
    for t in range(num_rounds):
        for m, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            replica.load_state_dict(anchor.state_dict())
            for tokens in data[t * updates : (t + 1) * updates]:
                optimizer.zero_grad()
                loss(replica, tokens[m * local_batch : (m + 1) * local_batch]).backward()
                torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()
        for index, parameter in enumerate(anchor.parameters()):
            parameter.grad = torch.stack([parameter.data - parameters(w)[index] for w in replicas]).mean(0)
        outer.step()
    return parameters(anchor)


def train_and_unflatten(runtime: Runtime, *overrides: str) -> list[np.ndarray]:
    """The first trainer's anchor after training, as the module's parameters."""
    anchor = train_small_pool(runtime, *PLAIN, "pool.trainers=1", *overrides)["anchors"][0]
    settings = small_settings(*overrides)
    module = small_module(settings)
    flat_model = FlatModel(module, runtime.device, settings.precision)
    flat_model.point_at(torch.from_numpy(anchor))
    return [parameter.numpy() for parameter in parameters(module)]


def assert_same(mine: list[np.ndarray], reference: list[torch.Tensor]) -> None:
    for ours, theirs in zip(mine, reference, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_trainer_is_diloco_as_published(num_ranks: int) -> None:
    overrides = ("pool.workers_per_trainer=2", "inner.lr=5e-3", "budget.rounds=5")
    mine = run_ranks(train_and_unflatten, [0] * num_ranks, *overrides)
    reference = reference_diloco(num_rounds=5, num_workers=2, updates=3, local_batch=2)
    for rank in mine:
        assert_same(rank, reference)


def test_one_worker_with_outer_rate_one_is_the_inner_optimizer_alone() -> None:
    overrides = ("algorithm=localsgd", "pool.workers_per_trainer=1", "algorithm.updates_per_round=1", "inner.lr=5e-3")
    (mine,) = run_ranks(train_and_unflatten, [0], *overrides, "budget.rounds=8", "inner.clip_norm=null")
    module = small_module(small_settings()).double()
    optimizer = torch.optim.AdamW(decay_groups(module, 0.1), lr=5e-3, betas=(0.9, 0.95), foreach=False)
    for tokens in batches(8, 2):
        optimizer.zero_grad()
        loss(module, tokens).backward()
        optimizer.step()
    assert_same(mine, parameters(module))


SGD = ("inner=sgd", "inner.momentum=0", "inner.lr=0.5", "inner.weight_decay=0", "inner.clip_norm=null")


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=localsgd", "algorithm.updates_per_round=1", "budget.rounds=8", "pool.workers_per_trainer=4"),
        ("algorithm=ddp", "algorithm.updates_per_round=4", "budget.rounds=2", "pool.workers_per_trainer=null",
         "batching.local_batch=4"),
    ],
)  # fmt: skip
def test_averaging_after_every_update_is_data_parallel_sgd(overrides: tuple[str, ...]) -> None:
    mine = run_ranks(train_and_unflatten, [0, 0], *SGD, *overrides)
    module = small_module(small_settings()).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for tokens in batches(8, 8):
        optimizer.zero_grad()
        loss(module, tokens).backward()
        optimizer.step()
    for rank in mine:
        assert_same(rank, parameters(module))


def test_labels_are_shifted_once() -> None:
    """The training loss equals transformers' own, which shifts by itself (position t predicts t + 1)."""
    module = small_module(small_settings())
    tokens = batches(1, 4)[0]
    ours = losses(module, Batch.packed(tokens))
    assert ours.shape == (4, SEQUENCE_LENGTH)
    torch.testing.assert_close(ours.mean(), module(input_ids=tokens, labels=tokens).loss)
