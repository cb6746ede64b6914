"""What strangers' Trainers bring: averages that travel when the training ends, and checkpoints that are torn."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adloco_dist import OuterSGD
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import STREAMING, on_ranks, values
from helpers.trainers import Model, new_trainer

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytestmark = pytest.mark.stranger


def train(runtime: Runtime, folder: str, streaming: str, num_updates: int) -> dict[str, Any]:
    from adloco_dist.integrations.trainer import DiLoCoCallback

    outer = OuterSGD(lr=0.5, momentum=0.0)
    callback = DiLoCoCallback(updates_per_round=4, wire=STREAMING[streaming], outer=outer)
    model = Model(seed=runtime.rank)
    new_trainer(runtime, folder, callback, model, num_updates).train()
    assert callback.diloco
    with callback.diloco.outer_weights():
        anchor = values(model)
    return {"values": values(model), "anchor": anchor, "holds anchor": callback.diloco.holds_anchor}


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda folder: None, "checkpoint-4"),
    "newest is missing": (lambda folder: shutil.rmtree(folder / "checkpoint-4"), "checkpoint-3"),
    "torn weights": (lambda folder: torn(folder / "checkpoint-4" / "model.safetensors"), "checkpoint-3"),
    "torn optimizer": (lambda folder: torn(folder / "checkpoint-4" / "optimizer.pt"), "checkpoint-3"),
    "torn state of DiLoCo": (lambda folder: torn(folder / "checkpoint-4" / "diloco.pt"), "checkpoint-3"),
    "torn state of Trainer": (lambda folder: torn(folder / "checkpoint-4" / "trainer_state.json"), "checkpoint-3"),
    "no state of DiLoCo": (lambda folder: (folder / "checkpoint-4" / "diloco.pt").unlink(), "checkpoint-3"),
}


def find_newest(runtime: Runtime, folder: str) -> dict[str, Any]:
    """The checkpoints that are found after something has happened to those of rank 1, and what resuming there gives."""
    from adloco_dist.integrations.trainer import DiLoCoCallback, newest_checkpoint

    found: dict[str, Any] = {}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    whole = Model()
    new_trainer(runtime, folder, DiLoCoCallback(updates_per_round=2), whole, 4, **saving).train()
    kept = Path(f"{folder}-kept-{runtime.rank}")
    own = Path(folder) / f"rank-{runtime.rank}"
    shutil.copytree(own, kept)
    for name, (damage, _) in DAMAGES.items():
        shutil.rmtree(own)
        shutil.copytree(kept, own)
        if runtime.rank == 1:
            damage(own)
        trainer = new_trainer(runtime, folder, DiLoCoCallback(updates_per_round=2), Model(seed=7), 4, **saving)
        newest = newest_checkpoint(trainer.args)
        found[name] = newest and Path(newest).relative_to(own).name
        trainer.train(resume_from_checkpoint=newest)
        assert isinstance(trainer.model, nn.Module)
        found[name] = (found[name], torch.equal(values(trainer.model), values(whole)))
    if runtime.rank == 1:
        shutil.rmtree(own)
    dist.barrier()
    found["none"] = newest_checkpoint(new_trainer(runtime, folder, DiLoCoCallback(), Model(), 4, **saving).args)
    return found


def everything(runtime: Runtime, folder: str) -> dict[str, Any]:
    trained = {
        (streaming, number): train(runtime, folder, streaming, number) for streaming in STREAMING for number in (8, 10)
    }
    return {"trained": trained, "found": find_newest(runtime, f"{folder}/found")}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks did: all in one process each, as Trainer takes seconds to import."""
    return on_ranks(everything, 2, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.parametrize("num_updates", [8, 10])
@pytest.mark.parametrize("streaming", STREAMING)
def test_at_the_end_the_model_is_the_anchor_on_all_ranks(
    done: list[dict[str, Any]], streaming: str, num_updates: int
) -> None:
    one, other = (rank["trained"][streaming, num_updates] for rank in done)
    assert torch.equal(one["values"], other["values"])
    for found in (one, other):
        assert found["holds anchor"]
        assert torch.equal(found["values"], found["anchor"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_ranks_resume_the_newest_update_that_all_have_whole(done: list[dict[str, Any]], damage: str) -> None:
    for rank in done:
        assert rank["found"][damage] == (DAMAGES[damage][1], True)


def test_where_a_rank_has_none_they_start_anew(done: list[dict[str, Any]]) -> None:
    assert [rank["found"]["none"] for rank in done] == [None, None]
