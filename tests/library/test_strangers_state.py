"""Saving and resuming as others do it: the same run to the bit, or one line that says why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from adloco_dist import DiLoCo, OuterSGD, Wire
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, Normed, adamw, batch, logged, on_ranks, update

pytestmark = pytest.mark.stranger
UPDATES, LAST = 4, 14
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"wire": Wire(delay_updates=2)},
    "in fragments": {"wire": Wire(fragments=2, delay_updates=1)},
    "sparse": {"wire": Wire(Sparse()), "outer": PLAIN},
    "sparse, delayed": {"wire": Wire(Sparse(), delay_updates=2), "outer": PLAIN},
    "int4 with feedback": {"wire": Wire(Quantized(WholeNumbers(4), keeps_residual=True)), "outer": PLAIN},
}
SOME = ("plain", "in fragments", "sparse")
"""Of a round's end, of averages under way, and with something that each rank owes."""


class Run:
    """A module, its optimizer, and DiLoCo."""

    def __init__(self, seed: int, way: str, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.module = Normed()
        nn.init.normal_(self.module.head.weight)
        (self.optimizer,) = adamw(self.module)
        self.diloco = DiLoCo(self.module, self.optimizer, **{"updates_per_round": UPDATES, **WAYS[way], **changes})

    def train(self, rank: int, start: int, end: int) -> "Run":
        with self.diloco:
            for number in range(start, end):
                update(self.module, [self.optimizer], batch(rank, number))
        return self

    def state(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), **self.outer()}

    def outer(self) -> dict[str, Any]:
        return {"diloco": self.diloco.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.diloco.load_state_dict(state["diloco"])

    def values(self) -> torch.Tensor:
        with self.diloco.outer_weights():
            anchor = [tensor.detach().flatten().double() for tensor in self.module.state_dict().values()]
        return torch.cat([tensor.detach().flatten().double() for tensor in self.module.state_dict().values()] + anchor)


def resume(runtime: Runtime, folder: str, way: str, saved_after: int, means: str) -> str:
    """The resumed run equals the one that was not stopped, or what the refusal says."""
    rank, named = runtime.rank, f"rank {runtime.rank}"
    whole = Run(rank, way).train(rank, 0, saved_after)
    path = Path(folder)
    if means == "torch.save":
        torch.save(whole.state(), path / f"{rank}.pt")
    elif means == "each rank under its own name":
        save({named: whole.state()}, checkpoint_id=path / "checkpoint")
    elif means == "only DiLoCo's under one name":
        own = {key: value for key, value in whole.state().items() if key != "diloco"}
        save({named: own, **whole.outer()}, checkpoint_id=path / "checkpoint")
    else:
        save(whole.state(), checkpoint_id=path / "checkpoint")
    whole.train(rank, saved_after, LAST)
    again = Run(7 + rank, way).train(rank, 0, 1)  # its optimizer has a state to load into
    if means == "torch.save":
        state = torch.load(path / f"{rank}.pt")
    else:
        state = again.state()
        if means == "each rank under its own name":
            state = {named: state}
        elif means == "only DiLoCo's under one name":
            state = {named: {key: value for key, value in state.items() if key != "diloco"}, **again.outer()}
        load(state, checkpoint_id=path / "checkpoint")
        state = {**state.get(named, {}), **{key: value for key, value in state.items() if key != named}}
    try:
        again.load(state)
    except ValueError as error:
        return str(error)
    again.train(rank, saved_after, LAST)
    return "equal" if torch.equal(again.values(), whole.values()) else "different"


@pytest.mark.parametrize(
    ("way", "means"),
    [
        *((way, "torch.save") for way in WAYS),
        *((way, means) for way in SOME for means in ("each rank under its own name", "only DiLoCo's under one name")),
    ],
)
def test_each_rank_resumes_its_own_to_the_bit(tmp_path: Path, way: str, means: str) -> None:
    assert on_ranks(resume, 2, str(tmp_path), way, 6, means) == ["equal"] * 2


@pytest.mark.parametrize("way", SOME)
def test_one_copy_for_all_ranks_is_refused(tmp_path: Path, way: str) -> None:
    """torch.distributed.checkpoint keeps one of what has the same name: a rank would go on with another's weights."""
    refused = [said for said in on_ranks(resume, 2, str(tmp_path), way, 6, "all under one name") if said != "equal"]
    assert refused
    for line in refused:
        assert line.startswith("state_dict: it is from the middle of a round; load the model's state after DiLoCo is")
        assert line.endswith("(torch.distributed.checkpoint keeps one of what has the same name on several ranks)")


def load_anothers(runtime: Runtime, folder: str, way: str, saved_after: int) -> str:
    """Rank 1 loads the file of rank 0."""
    path = Path(folder)
    run = Run(0, way).train(runtime.rank, 0, saved_after)
    torch.save(run.state(), path / f"{runtime.rank}.pt")
    dist.barrier()
    again = Run(0, way)
    lines = logged()
    try:
        again.load(torch.load(path / "0.pt"))
    except ValueError as error:
        return str(error)
    return "; ".join(lines)


@pytest.mark.parametrize("way", SOME)
def test_the_state_of_another_rank_is_refused(tmp_path: Path, way: str) -> None:
    lowest, other = on_ranks(load_anothers, 2, str(tmp_path), way, 6)
    assert lowest == ""
    assert "worker 1 of 2" in other
    assert other.startswith("state_dict: its ") or other.startswith("state_dict: it is not that of worker 1 of 2;")


def test_at_the_end_of_a_plain_round_any_ranks_will_do(tmp_path: Path) -> None:
    assert on_ranks(load_anothers, 2, str(tmp_path), "plain", 8) == [""] * 2


def change_setting(runtime: Runtime, saved_after: int, changes: dict[str, Any]) -> list[str]:
    state = Run(0, "plain").train(runtime.rank, 0, saved_after).state()
    again = Run(0, "plain", **changes)
    lines = logged()
    try:
        again.load(state)
    except ValueError as error:
        return [f"refused: {error}"]
    return lines


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"updates_per_round": 5}, "state_dict: updates_per_round was 4 when it was saved, and is 5 here"),
        ({"outer": OuterSGD(lr=0.5)}, "state_dict: outer lr was 0.7 when it was saved, and is 0.5 here"),
        ({"wire": Wire(Quantized(WholeNumbers(8)))}, "state_dict: averager was FullPrecision() when it was saved, and"),
    ],
)
def test_another_setting_is_refused_in_a_round_and_said_between_rounds(changes: dict[str, Any], line: str) -> None:
    for (refusal,) in on_ranks(change_setting, 2, 6, changes):
        assert refusal.startswith(f"refused: {line}")
    for (said,) in on_ranks(change_setting, 2, 8, changes):
        assert said.startswith(line)


def forget_the_optimizer(runtime: Runtime) -> list[str]:
    state = Run(0, "plain").train(runtime.rank, 0, 8).state()
    again = Run(0, "plain")
    lines = logged()
    again.module.load_state_dict(state["module"])
    again.diloco.load_state_dict(state["diloco"])
    return lines


def test_an_optimizer_that_is_not_as_it_was_is_said() -> None:
    for (line,) in on_ranks(forget_the_optimizer, 2):
        assert line.startswith("state_dict: the optimizer's state is not the one that this rank has saved; load it")
