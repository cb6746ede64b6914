"""A user's own model and loss in a pool: the same numbers as the built-in one, and what is refused on all ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.losses import losses
from adloco_dist.objective.own import OwnObjective
from adloco_dist.setup.building import examine_module
from helpers.processes import run_ranks
from helpers.support import (
    FOUR_TRAINERS,
    own_first_batch,
    own_small_splits,
    small_module,
    small_settings,
    train_small_pool,
)

POOL = ("pool.trainers=2", "pool.workers_per_trainer=2", "batching.request=norm_test", "budget=3rounds")


def sum_and_count(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
    return losses(module, batch).sum(), batch.total_targets


def small_own(*overrides: str) -> OwnObjective:
    return OwnObjective(lambda: small_module(small_settings(*overrides)), sum_and_count, own_first_batch, seed=0)


def train_own(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    return train_small_pool(
        runtime, *FOUR_TRAINERS, *overrides, objective=small_own(*overrides), splits=own_small_splits()
    )


def test_an_own_objective_trains_like_the_built_in_one() -> None:
    own, built_in = (run_ranks(work, [0, 0], *FOUR_TRAINERS, *POOL) for work in (train_own, train_small_pool))
    for mine, theirs in zip(own, built_in, strict=True):
        for trainer, anchor in theirs["anchors"].items():
            np.testing.assert_array_equal(mine["anchors"][trainer], anchor)
    keys = ("trainer", "round", "request", "validation_loss")
    records = [[[row.get(key) for key in keys] for row in ranks[0]["records"]] for ranks in (own, built_in)]
    assert records[0] == records[1]
    assert not any("validation_perplexity" in row for row in own[0]["records"])


class Bottleneck(nn.Module):
    """Logits of the next token by a network with batch normalisation over sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 23)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens).mean(1)))


def of_the_last_token(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
    logits = module(batch.tokens[:, :-1])
    return nn.functional.cross_entropy(logits, batch.tokens[:, -1], reduction="sum"), len(batch)


def not_finite(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
    loss, count = sum_and_count(module, batch)
    return loss * float("nan"), count


def of_another_key(module: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return sum_and_count(module, {"tokens": batch}["inputs"])


def mean(module: nn.Module, batch: TokenBatch) -> Any:
    return losses(module, batch).mean()


def examined(runtime: Runtime, case: str) -> str:
    settings = small_settings(*FOUR_TRAINERS)
    cases: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
        "mean": (lambda: small_module(settings), mean),
        "not finite": (lambda: small_module(settings), not_finite),
        "an error": (lambda: small_module(settings), of_another_key),
        "batch normalisation": (Bottleneck, of_the_last_token),
    }
    build, loss = cases[case]
    objective = OwnObjective(build, loss, own_first_batch, seed=0)
    with pytest.raises(SettingsError) as raised:
        examine_module(objective, objective.build(runtime.device, in_bf16=False), settings, runtime)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "detail"),
    [
        ("mean", "loss=mean: returned a tensor of shape []; it must return (sum, count)"),
        ("not finite", "the loss of the first 2 sequence(s) is nan"),
        ("an error", "(KeyError: 'inputs', test_own_models.py:"),
        ("batch normalisation", "a micro-batch may be one sequence: use LayerNorm or GroupNorm"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line_on_all_ranks(case: str, detail: str) -> None:
    for line in run_ranks(examined, [0, 0], case):
        assert detail in line
        assert "\n" not in line


def seeded_by_rank(runtime: Runtime) -> str:
    def build() -> nn.Module:
        torch.manual_seed(runtime.rank)
        return Bottleneck()

    objective = OwnObjective(build, lambda module, batch: of_the_first_half(module, batch), own_first_batch, seed=0)
    with pytest.raises(SettingsError) as raised:
        examine_module(objective, objective.build(runtime.device, in_bf16=False), small_settings(), runtime)
    return str(raised.value)


def of_the_first_half(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
    return module.eval()(batch.tokens[:, :6]).logsumexp(1).sum(), len(batch)


def test_ranks_must_build_the_same_weights() -> None:
    for line in run_ranks(seeded_by_rank, [0, 0]):
        assert line.startswith("the model as it was built differs between ranks: ")
        assert "random numbers come from torch alone" in line
