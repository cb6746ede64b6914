"""Special cases of the pool are algorithms that everybody knows, number for number."""

import numpy as np
import pytest
import torch

from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.losses import losses
from helpers.launched import ClippedUpdates, batches, decay_groups, loss, new_adamw, parameters, train_and_unflatten
from helpers.plain import published
from helpers.processes import run_ranks
from helpers.support import SEQUENCE_LENGTH, small_module, small_settings


def assert_same(mine: list[np.ndarray], reference: list[torch.Tensor]) -> None:
    for ours, theirs in zip(mine, reference, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_trainer_is_diloco_as_published(num_ranks: int) -> None:
    overrides = ("pool.workers_per_trainer=2", "inner.lr=5e-3", "budget=5rounds")
    mine = run_ranks(train_and_unflatten, [0] * num_ranks, *overrides)
    module, take_update = small_module(small_settings()).double(), ClippedUpdates(batches(15, 4), local_batch=2)
    reference = published(module, new_adamw, 2, num_rounds=5, updates_per_round=3, take_update=take_update)
    for rank in mine:
        assert_same(rank, reference)


def test_one_worker_with_outer_rate_one_is_the_inner_optimizer_alone() -> None:
    overrides = ("algorithm=localsgd", "pool.workers_per_trainer=1", "algorithm.updates_per_round=1", "inner.lr=5e-3")
    (mine,) = run_ranks(train_and_unflatten, [0], *overrides, "budget=8rounds", "inner.clip_norm=null")
    module = small_module(small_settings()).double()
    optimizer = torch.optim.AdamW(decay_groups(module, 0.1), lr=5e-3, betas=(0.9, 0.95), foreach=False)
    for tokens in batches(8, 2):
        optimizer.zero_grad()
        loss(module, tokens).backward()
        optimizer.step()
    assert_same(mine, parameters(module))


def test_one_worker_with_muon_is_torch_s_muon_and_its_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64: torch always orthogonalises in bf16, where a worker's updates are those of torch to the bit
    (tests/unit/pool/test_muon.py)."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    rate = 1e-2
    overrides = ("inner=muon", f"inner.lr={rate}", "inner.warmup_fraction=0", "inner.clip_norm=null",
                 "algorithm=localsgd", "pool.workers_per_trainer=1", "budget=3rounds")  # fmt: skip
    (mine,) = run_ranks(train_and_unflatten, [0], *overrides)
    module, inner = small_module(small_settings()).double(), small_settings(*overrides).inner
    named = dict(module.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and ".h." in name]
    muon = torch.optim.Muon(matrices, rate, 0.1, inner.momentum, adjust_lr_fn="match_rms_adamw")
    rest = [p for name, p in named.items() if p.ndim == 1 or ".h." not in name]
    groups = [{"params": [p for p in rest if p.ndim == ndim], "weight_decay": 0.1 * (ndim - 1)} for ndim in (1, 2)]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(inner.beta1, inner.beta2), eps=inner.eps, foreach=False)
    for tokens in batches(9, 2):
        module.zero_grad()
        loss(module, tokens).backward()
        muon.step()
        adamw.step()
    assert_same(mine, parameters(module))


SGD = ("inner=sgd", "inner.momentum=0", "inner.lr=0.5", "inner.weight_decay=0", "inner.clip_norm=null")


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=localsgd", "algorithm.updates_per_round=1", "budget=8rounds", "pool.workers_per_trainer=4"),
        ("algorithm=ddp", "algorithm.updates_per_round=4", "budget=2rounds", "pool.workers_per_trainer=null",
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
    ours = losses(module, TokenBatch.packed(tokens))
    assert ours.shape == (4, SEQUENCE_LENGTH)
    torch.testing.assert_close(ours.mean(), module(input_ids=tokens, labels=tokens).loss)
