"""DiLoCo in transformers' Trainer: the published algorithm, saved and resumed, and what is refused."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adloco_dist import DiLoCo
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.integrations.ranks import join_ranks
from helpers.plain import batch, on_ranks, published
from helpers.trainers import CLIPPED, MICRO_BATCHES, RATE, Model, Pretrained, new_trainer

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

ROUNDS, UPDATES = 3, 3


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0)]


def update(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], worker: int, number: int) -> None:
    """The update of Trainer, by hand."""
    for micro_batch in range(MICRO_BATCHES):
        tokens, labels = batch(worker, MICRO_BATCHES * number + micro_batch).unbind(1)
        (module(tokens, labels)["loss"] / MICRO_BATCHES).backward()
    nn.utils.clip_grad_norm_(module.parameters(), CLIPPED)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def tensors(module: nn.Module, diloco: DiLoCo) -> dict[str, Any]:
    state = diloco.state_dict()
    return {"model": dict(module.state_dict()), **{part: state[part] for part in ("anchor", "momentum", "buffers")}}


def train(runtime: Runtime, folder: str) -> dict[str, Any]:
    from adloco_dist.integrations.trainer import DiLoCoCallback

    callback = DiLoCoCallback(updates_per_round=UPDATES)
    model = Model(seed=runtime.rank)  # of which rank 0's counts
    trainer = new_trainer(runtime, folder, callback, model, ROUNDS * UPDATES)
    trainer.train()
    assert callback.diloco and callback.diloco.last_step
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    values = [parameter.detach() for parameter in model.parameters()]
    return {"values": values, "round": callback.diloco.round, "num_losses": len(losses)}


def train_and_resume(runtime: Runtime, folder: str) -> dict[str, Any]:
    """Eight updates in rounds of three, by hand; in Trainer; and in one that resumes the middle of the second round."""
    from adloco_dist.integrations.trainer import DiLoCoCallback

    by_hand = Pretrained()
    optimizers = adamw(by_hand)
    with DiLoCo(by_hand, optimizers, updates_per_round=UPDATES) as diloco:
        for number in range(8):
            update(by_hand, optimizers, runtime.rank, number)
        diloco.outer_step()
    callback = DiLoCoCallback(updates_per_round=UPDATES)
    saving = {"save_strategy": "steps", "save_steps": 5}
    trainer = new_trainer(runtime, folder, callback, Pretrained(), 8, **saving)
    trainer.train()
    again = DiLoCoCallback(updates_per_round=UPDATES)
    resumed = new_trainer(runtime, folder, again, Pretrained(seed=7 + runtime.rank), 8, **saving)
    checkpoint = Path(resumed.args.output_dir) / "checkpoint-5"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 5
    from safetensors.torch import load_file

    assert callback.diloco and again.diloco
    return {
        "rounds": (diloco.round, callback.diloco.round, again.diloco.round, again.diloco.updates),
        "by hand": tensors(by_hand, diloco),
        "whole": tensors(trainer.model, callback.diloco),
        "resumed": tensors(resumed.model, again.diloco),
        "last checkpoint": load_file(checkpoint.with_name("checkpoint-8") / "model.safetensors"),
        "middle": load_file(checkpoint / "model.safetensors"),
    }


def refused(runtime: Runtime, folder: str) -> dict[str, str]:
    """The line with which each of several mistakes is refused on this rank, in this order."""
    from adloco_dist.integrations.trainer import DiLoCoCallback

    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}

    def started(updates: int = 2, resume: str | None = None, **changes: Any) -> str:
        callback = DiLoCoCallback(updates_per_round=2)
        trainer = new_trainer(runtime, folder, callback, Model(), updates, **changes)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except ValueError as error:
            return str(error)
        return "nothing"

    own = Path(folder) / f"rank-{runtime.rank}"
    lines = {
        "shared folder": started(output_dir=folder, **saving),
        "shared folder that is not used": started(output_dir=folder),
        "updates": started(updates=2 + runtime.rank),
        "best": started(load_best_model_at_end=True, eval_strategy="steps", eval_steps=1, **saving),
        "saved": started(**saving),
        "other update": started(4, str(own / f"checkpoint-{1 + runtime.rank}")),
    }
    (own / "checkpoint-1" / "model.safetensors").write_bytes((own / "checkpoint-2" / "model.safetensors").read_bytes())
    lines["other weights"] = started(4, str(own / "checkpoint-1"))
    (own / "checkpoint-1" / "diloco.pt").unlink()
    lines["no state"] = started(4, str(own / "checkpoint-1"))
    (own / "checkpoint-1" / "diloco.pt").write_bytes((own / "checkpoint-2" / "diloco.pt").read_bytes()[:500])
    lines["torn"] = started(4, str(own / "checkpoint-1"))
    lines["batch size"] = started(auto_find_batch_size=True)
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"RANK": str(runtime.rank), "LOCAL_RANK": str(runtime.rank)} | sizes  # as under torchrun
    lines["not alone"] = started()
    return lines


def everything(runtime: Runtime, folder: str) -> dict[str, Any]:
    names = ("published", "resumed", "refused")
    return {
        name: act(runtime, f"{folder}/{name}")
        for name, act in zip(names, (train, train_and_resume, refused), strict=True)
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks did, and where: all in one process each, as Trainer takes seconds to import."""
    folder = tmp_path_factory.mktemp("trainer")
    return folder, on_ranks(everything, 2, str(folder))


def test_it_takes_the_steps_that_are_published(done: tuple[Path, list[dict[str, Any]]]) -> None:
    reference = published(Model(), adamw, 2, ROUNDS, UPDATES, update)
    for rank in (rank["published"] for rank in done[1]):
        assert (rank["round"], rank["num_losses"]) == (ROUNDS, ROUNDS * UPDATES)
        torch.testing.assert_close(rank["values"], reference, rtol=0, atol=1e-12)


def test_it_resumes_the_middle_of_a_round_and_ends_with_an_outer_step(done: tuple[Path, list[dict[str, Any]]]) -> None:
    one, other = (rank["resumed"] for rank in done[1])
    for rank in (one, other):
        assert rank["rounds"] == (3, 3, 3, 0)
        torch.testing.assert_close(rank["whole"], rank["by hand"], rtol=0, atol=1e-12)
        torch.testing.assert_close(rank["resumed"], rank["whole"], rtol=0, atol=0)
        torch.testing.assert_close(rank["last checkpoint"], rank["whole"]["model"], rtol=0, atol=0)
    assert not torch.equal(one["middle"]["inner.head.bias"], other["middle"]["inner.head.bias"])
    for name, parameter in one["whole"]["model"].items():
        torch.testing.assert_close(parameter, other["whole"]["model"][name], rtol=0, atol=0)


def test_a_mistake_is_reported_in_one_line(done: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = done[0] / "refused"
    for rank, lines in enumerate(rank["refused"] for rank in done[1]):
        resumed = f"resume_from_checkpoint: {folder}/rank-{rank}/checkpoint-1/diloco.pt"
        rule = "resume all ranks from their checkpoint-2, the newest that all have whole (newest_checkpoint finds it)"
        torn, _, afterwards = lines["torn"].partition("(")
        assert afterwards.endswith(f"); {rule}")
        lines["torn"] = f"{torn}("
        assert lines == {
            "shared folder": f"output_dir={folder}: ranks {{0,1}} would save to it; give each rank its own, as in "
            "output_dir=f'run/rank-{rank}'",
            "shared folder that is not used": "nothing",
            "updates": "max_steps differs between ranks: 2 on rank 0, 3 on rank 1; set max_steps, or give every rank "
            "as many batches as the others",
            "best": "load_best_model_at_end=True: each rank would load what it found best by itself; set it to False, "
            "and load the checkpoint of your choice afterwards",
            "saved": "nothing",
            "other update": f"global_step differs between ranks: 1 on rank 0, 2 on rank 1; {rule}",
            "other weights": f"{resumed} was saved with other weights than Trainer has loaded; {rule}",
            "no state": f"{resumed} does not exist, as DiLoCoCallback saves it; {rule}",
            "torn": f"{resumed} is torn (",
            "batch size": "auto_find_batch_size=True: a rank that runs out of memory would start anew alone; set it to "
            "False, and per_device_train_batch_size to what fits on every rank",
            "not alone": "world_size=2: Trainer would average their gradients in every update "
            "(DistributedDataParallel); call adloco_dist.integrations.ranks.join_ranks() before TrainingArguments",
        }


def test_ranks_join_under_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK: it is not in the environment; start the script with torchrun, and"):
        join_ranks()
