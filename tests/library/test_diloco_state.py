"""Saving and resuming `DiLoCo`: the resumed run is the same to the bit, wherever it was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from adloco_dist import DiLoCo, OuterSGD, Wire
from adloco_dist.averaging.agreement import FIELDS
from adloco_dist.averaging.codecs import BFloat16
from adloco_dist.averaging.outer_step import outer_entries
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.replica import replica_entries
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Normed, Tied, adamw, batch, on_ranks, update

UPDATES, LAST = 3, 8


class Run:
    """Everything that a user constructs, and saves."""

    def __init__(self, seed: int) -> None:
        self.module = Normed()
        torch.manual_seed(seed)
        nn.init.normal_(self.module.head.weight)
        self.optimizers = adamw(self.module)
        self.diloco = DiLoCo(self.module, self.optimizers, updates_per_round=UPDATES)

    def train(self, runtime: Runtime, start: int, end: int) -> "Run":
        with self.diloco:
            for number in range(start, end):
                update(self.module, self.optimizers, batch(runtime.rank, number))
        return self

    def own_state(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizers[0].state_dict()}

    def load(self, own: dict[str, Any], outer: dict[str, Any]) -> None:
        self.module.load_state_dict(own["module"])
        self.optimizers[0].load_state_dict(own["optimizer"])
        self.diloco.load_state_dict(outer)

    def result(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "outer": self.diloco.state_dict()}


def resume_from_files(runtime: Runtime, folder: str, saved_after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    path = Path(folder) / f"rank-{runtime.rank}.pt"
    run = Run(seed=runtime.rank).train(runtime, 0, saved_after)
    torch.save({"own": run.own_state(), "outer": run.diloco.state_dict()}, path)
    whole = run.train(runtime, saved_after, LAST).result()
    again = Run(seed=7 + runtime.rank)
    again.load(**torch.load(path))
    return whole, again.train(runtime, saved_after, LAST).result()


def assert_same(one: object, other: object) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_resumed_from_files_is_the_same_run(tmp_path: Path, saved_after: int) -> None:
    """In the first round, when no buffer is known to change yet; at the end of a round; in the middle of one."""
    for whole, again in on_ranks(resume_from_files, 2, str(tmp_path), saved_after):
        assert_same(whole, again)
        assert (whole["outer"]["round"], whole["outer"]["updates"]) == divmod(LAST, UPDATES)


def resume_with_dcp(runtime: Runtime, folder: str, saved_after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outer state once for all ranks, and each worker's own beside it."""
    run = Run(seed=runtime.rank).train(runtime, 0, saved_after)
    save({"outer": run.diloco.state_dict(), f"worker {runtime.rank}": run.own_state()}, checkpoint_id=folder)
    whole = run.train(runtime, saved_after, LAST).result()
    again = Run(seed=7 + runtime.rank).train(runtime, 0, 1)  # its optimizer has a state to load into
    state = {"outer": again.diloco.state_dict(), f"worker {runtime.rank}": again.own_state()}
    load(state, checkpoint_id=folder)
    again.load(state[f"worker {runtime.rank}"], state["outer"])
    return whole, again.train(runtime, saved_after, LAST).result()


@pytest.mark.parametrize("saved_after", [1, 5, 6])
def test_resumed_with_torch_distributed_checkpoint_is_the_same_run(tmp_path: Path, saved_after: int) -> None:
    for whole, again in on_ranks(resume_with_dcp, 2, str(tmp_path / "checkpoint"), saved_after):
        assert_same(whole, again)


def load_wrongly(runtime: Runtime, what: str) -> str:
    module = Tied()
    optimizers = adamw(module)
    diloco = DiLoCo(module, optimizers)
    update(module, optimizers, batch(0, 0))
    diloco.outer_step()
    state = diloco.state_dict()
    if what == "another model":
        other = Normed()
        diloco = DiLoCo(other, adamw(other))
    elif what == "another shape":
        other = Tied(width=4)
        diloco = DiLoCo(other, adamw(other))
    elif what == "another type":
        other = Tied().double()
        diloco = DiLoCo(other, adamw(other))
    elif what == "no momentum":
        diloco = DiLoCo(module, optimizers, outer=OuterSGD(momentum=0))
    elif what == "part":
        del state["round"]
    anchor = {name: tensor.clone() for name, tensor in diloco.state_dict()["anchor"].items()}
    with pytest.raises(ValueError) as raised:
        diloco.load_state_dict(state)
    assert_same(diloco.state_dict()["anchor"], anchor)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (
            "another model",
            "state_dict: its anchor of norm.weight is missing, but [8] torch.float32 here; load",
        ),
        (
            "another shape",
            "state_dict: its anchor of first.weight is [8, 8] torch.float32, but [4, 4] torch.f",
        ),
        (
            "another type",
            "state_dict: its anchor of first.weight is [8, 8] torch.float32, but [8, 8] torch.f",
        ),
        ("no momentum", "state_dict: its momentum of first.weight is [8, 8] torch.float32, but missing here; load the"),
        ("part", "state_dict: it has no round; load what DiLoCo.state_dict returned"),
    ],
)
def test_the_state_of_something_else_is_refused(what: str, line: str) -> None:
    (refusal,) = on_ranks(load_wrongly, 1, what)
    assert refusal.startswith(line), refusal


def load_before_construction(runtime: Runtime) -> str:
    run = Run(seed=0).train(runtime, 0, 4)
    own, outer = run.own_state(), run.diloco.state_dict()
    module = Normed()
    module.load_state_dict(own["module"])
    diloco = DiLoCo(module, adamw(module), updates_per_round=UPDATES)
    try:
        diloco.load_state_dict(outer)
    except ValueError as error:
        return str(error)
    return ""


def test_weights_that_construction_has_overwritten_are_noticed() -> None:
    lowest, other = on_ranks(load_before_construction, 2)
    assert lowest == ""
    assert other.startswith("state_dict: it is from the middle of a round; load the model's state after DiLoCo is")


def kept(runtime: Runtime) -> tuple[set[str], set[str]]:
    """The names of what is kept of an outer step, and of a state; one with empty parts is loaded, as they once were."""
    module = Tied()
    optimizers = adamw(module)
    wire = Wire(Quantized(BFloat16(), True), delay_updates=1)
    diloco = DiLoCo(module, optimizers, 2, OuterSGD(1.0, 0.9), None, wire)
    state = diloco.state_dict()
    entries = [*outer_entries(OuterSGD(), keeps_residual=True), *replica_entries(is_delayed=True)]
    diloco = DiLoCo(module, optimizers, 2)
    diloco.load_state_dict({**diloco.state_dict(), "residual": {}, "departed": {}, "awaits": None})
    return {entry.name for entry in entries}, set(state)


def test_a_state_has_what_is_kept_of_an_outer_step() -> None:
    ((entries, state),) = on_ranks(kept, 1)
    assert len(entries) == 5
    assert state == {*entries, *FIELDS, "buffers"}
