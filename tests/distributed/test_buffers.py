"""Buffers that training changes and frozen parameters in a pool on several ranks (docs/state.md)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.setup.building import examine_module
from helpers.modules import CHANGING, Normed
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS, held_anchors, small_objective, small_settings, train_small_pool

POOL = ("pool.trainers=2", "pool.workers_per_trainer=2", "outer=nesterov", "inner.lr=5e-3")


def train_normed(runtime: Runtime, *overrides: str) -> dict[str, Any]:
    return train_small_pool(runtime, *FOUR_TRAINERS, *POOL, *overrides, module=Normed())


def flat() -> FlatModel:
    return FlatModel(Normed(), torch.device("cpu"), small_settings().precision, CHANGING)


def buffers_of(anchor: np.ndarray) -> dict[str, torch.Tensor]:
    flat_model = flat()
    flat_model.point_at(torch.from_numpy(anchor))
    return {name: flat_model.module.get_buffer(name) for name in CHANGING}


@pytest.mark.parametrize("policy", ["none", "worst_with_worst"])
def test_the_run_does_not_depend_on_where_workers_are(policy: str) -> None:
    """Where workers are hosted changes nothing; a merge averages buffers with the anchors."""
    merges = (f"merge={policy}", "merge.every_rounds=2") if policy != "none" else ()
    held = [held_anchors(run_ranks(train_normed, [0] * ranks, *merges)) for ranks in (1, 2, 4)]
    assert len(held[0]) == (2 if policy == "none" else 1)
    for other in held[1:]:
        for trainer, anchor in held[0].items():
            np.testing.assert_allclose(other[trainer], anchor, rtol=0, atol=1e-9)
    for anchor in held[0].values():
        found = buffers_of(anchor)
        assert found["norm.num_batches_tracked"] == 4 * 3
        assert found["center"].abs().sum() > 0
        assert (found["norm.running_var"] > 0).all()


@pytest.mark.parametrize("looks", [5, 12])
def test_resumed_in_the_middle_of_a_round_is_the_same_run(tmp_path: Path, looks: int) -> None:
    overrides = (*POOL, "merge=none", "checkpoint.every=2rounds")
    whole = run_ranks(train_module_kept, [0, 0], str(tmp_path / "whole"), None, *overrides)
    stopped = run_ranks(train_module_kept, [0, 0], str(tmp_path / "halves"), looks, *overrides)
    assert any(0 < done < 3 for rank in stopped for done in rank["updates_done"])
    again = run_ranks(train_module_kept, [0, 0], str(tmp_path / "halves"), None, *overrides)
    for one, other in zip(whole, again, strict=True):
        for trainer, anchor in one["anchors"].items():
            np.testing.assert_array_equal(other["anchors"][trainer], anchor)


def train_module_kept(runtime: Runtime, directory: str, looks: int | None, *overrides: str) -> dict[str, Any]:
    return train_kept(runtime, directory, looks, *FOUR_TRAINERS, *overrides, module=Normed())


def test_data_parallel_ranks_average_their_buffers_once_a_round() -> None:
    overrides = ("algorithm=ddp", "pool.trainers=1", "pool.workers_per_trainer=null", "batching.request=none")
    ranks = run_ranks(train_normed, [0, 0], *overrides)
    (anchor,) = held_anchors(ranks).values()
    found = buffers_of(anchor)
    assert found["norm.num_batches_tracked"] == 4 * 3
    assert found["center"].abs().sum() > 0


def test_only_what_is_trained_is_sent() -> None:
    (record,) = (r for r in run_ranks(train_normed, [0, 0], "budget=1rounds", "pool.trainers=1")[0]["records"]
                 if r["round"] == 1)  # fmt: skip
    assert record["bytes_sent"]["outer"] == 2 * flat().payload.nbytes
    assert flat().num_elements < Normed().embedding.weight.numel() + flat().buffer_boundary


def examined(runtime: Runtime, change: str, *overrides: str) -> str:
    module = Normed()
    if change == "all frozen":
        module.requires_grad_(False)
    elif change == "another embedding on rank 1":
        module.embedding.weight.data.add_(runtime.rank)
    elif change == "another mask on rank 1":
        module.get_buffer("mask").add_(runtime.rank)
    elif change == "a complex buffer":
        module.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        module.head.register_forward_hook(lambda *_: setattr(module, "turns", 1j * module.get_buffer("turns")))
    with pytest.raises(SettingsError) as raised:
        examine_module(small_objective(small_settings()), module, small_settings(*FOUR_TRAINERS, *overrides), runtime)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "overrides", "detail"),
    [
        ("all frozen", (), "all of its parameters are frozen"),
        ("another embedding on rank 1", (), "what the model keeps frozen differs between ranks: "),
        ("another mask on rank 1", (), "what the model keeps frozen differs between ranks: "),
        ("a complex buffer", (), "training changes its buffers, and turns is sparse, quantized or complex"),
    ],
)
def test_what_cannot_be_trained_is_refused_on_all_ranks(change: str, overrides: tuple[str, ...], detail: str) -> None:
    for line in run_ranks(examined, [0, 0], change, *overrides):
        assert detail in line
        assert "\n" not in line
