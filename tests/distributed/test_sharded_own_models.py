"""Models of users that several ranks hold together, and those that they cannot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule

from adloco_dist.checkpoint import model as saved_model
from adloco_dist.checkpoint.model import save_model
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.own import OwnObjective
from adloco_dist.pool.local_pool import LocalPool
from helpers.processes import run_ranks
from helpers.sharded import whole_anchors
from helpers.support import FOUR_TRAINERS, own_first_batch, own_small_splits, train_small_pool

WIDTH, TOKENS = 8, 23
POOL = ("pool.trainers=1", "pool.workers_per_trainer=1", "pool.ranks_per_worker=2", "budget=2rounds")


class Layers(nn.Module):
    """Logits of the next token: a frozen embedding that is dealt by columns, layers, and a head without a bias."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.embedding.weight.requires_grad = False
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def layer(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


def tied() -> nn.Module:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return Layers(first, second)


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    match name:
        case "layers":
            return Layers(layer(), layer(), layer())
        case "named":
            return Named()
        case "one layer":
            return nn.Sequential(nn.Embedding(TOKENS, TOKENS + 1))
        case "tied":
            return tied()
        case "odd":
            return Layers(layer(7), layer(7))
        case _:
            return Layers(layer(), nn.Sequential(nn.Linear(WIDTH, WIDTH), Normed()))


class Named(nn.Module):
    """Logits of the next token, of layers that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS + 1, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.first, self.second = layer(), layer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embedding(tokens))))


class Normed(nn.Module):
    """Batch normalisation, over all tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden.flatten(0, 1)).view(hidden.shape)


def sum_and_count(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
    logits, wanted = module(batch.tokens[:, :-1]), batch.tokens[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"), wanted.numel()


BLOCKS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "named": lambda module: [module.first, module.second],
}


def train(runtime: Runtime, name: str, size: int, folder: str) -> Any:
    """The whole anchors; the files of the model lie in the folder."""
    pools: list[LocalPool] = []
    objective = OwnObjective(lambda: built(name), sum_and_count, own_first_batch, 0, BLOCKS.get(name))
    wanted = (*POOL, f"pool.ranks_per_worker={size}")
    try:
        whole = built(name) if size == 1 else None
        train_small_pool(
            runtime,
            *FOUR_TRAINERS,
            *wanted,
            module=whole,
            objective=objective,
            splits=own_small_splits(),
            prepare=pools.append,
        )
    except SettingsError as error:
        return str(error)
    anchors = whole_anchors(pools[0])
    kinds = {name for name, one in pools[0].flat_model.module.named_modules() if isinstance(one, FSDPModule)}
    assert name not in BLOCKS or size == 1 or kinds == {"", "first", "second"}
    save_model(Path(folder), pools[0].flat_model, pools[0].trainers[0].anchor, objective)
    return anchors


def train_into_small_files(runtime: Runtime, *arguments: Any) -> Any:
    saved_model.FILE_BYTES = 1000
    return train(runtime, *arguments)


@pytest.mark.parametrize("name", ["layers", "named"])
def test_layers_are_found_or_named_and_frozen_parameters_stay(name: str, tmp_path: Path) -> None:
    (reference,) = run_ranks(train, [0], name, 1, str(tmp_path / "one"))
    for anchors in run_ranks(train, [0, 0], name, 2, str(tmp_path / "two"), ranks_per_worker=2):
        for key, value in reference[0].items():
            np.testing.assert_allclose(anchors[0][key], value, rtol=0, atol=1e-12, err_msg=key)
    ours, theirs = (load_file(tmp_path / folder / "model" / "model.safetensors") for folder in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-12, msg=key)


def test_a_large_model_is_written_into_several_files(tmp_path: Path) -> None:
    arguments = ("layers", 2, str(tmp_path))
    (anchors, _) = run_ranks(train_into_small_files, [0, 0], *arguments, ranks_per_worker=2)
    index = json.loads((tmp_path / "model" / saved_model.INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(tmp_path / "model" / file).items()}
    assert found.keys() == index["weight_map"].keys() == anchors[0].keys()
    for name, value in anchors[0].items():
        np.testing.assert_array_equal(found[name].numpy(), value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one layer", ["has no list of layers", "use pool.ranks_per_worker=1"]),
        ("tied", ["its parameter layers.1.weight is used in several of its layers"]),
        ("odd", ["its parameter layers.0.1.bias [7] has no dimension that 2 ranks can share evenly"]),
        ("normed", ["training changes no buffer of, as it does layers.1.1.norm.running_mean; use 1"]),
    ],
)
def test_models_that_ranks_cannot_hold_together_are_refused(name: str, words: list[str], tmp_path: Path) -> None:
    lines = run_ranks(train, [0, 0], name, 2, str(tmp_path), ranks_per_worker=2)
    assert lines[0] == lines[1]
    assert lines[0].startswith("pool.ranks_per_worker=2: ")
    assert "\n" not in lines[0]
    for word in words:
        assert word in lines[0]


def test_a_workers_ranks_must_stand_on_one_node(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"pool.ranks_per_worker=2: ranks 0 to 1 stand on nodes 0, 1; .*one node"):
        run_ranks(train_small_pool, [0, 1], *FOUR_TRAINERS, *POOL, ranks_per_worker=2)
