"""`DiLoCo` with fragments and averages that travel while updates are taken."""

from typing import Any

import pytest
import torch

from adloco_dist import DiLoCo, OuterSGD, Wire
from adloco_dist.averaging.checks import MARK_ELEMENTS, PeerLostError
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Normed, Tied, adamw, batch, on_ranks, sgd, update

PLAIN_SGD = OuterSGD(lr=1.0, momentum=0.0)
WAYS: dict[str, tuple[Wire, OuterSGD]] = {
    "fragments": (Wire(fragments=3), OuterSGD()),
    "delay": (Wire(delay_updates=2), OuterSGD()),
    "both": (Wire(Quantized(WholeNumbers(4)), 2, 2), OuterSGD()),
    "sparse": (Wire(Sparse(0.1), 2, 1), PLAIN_SGD),
}
UPDATES, LAST = 6, 21


def new(way: str) -> tuple[Normed, list[torch.optim.Optimizer], DiLoCo]:
    module = Normed()
    optimizers = adamw(module)
    wire, outer = WAYS[way]
    return module, optimizers, DiLoCo(module, optimizers, UPDATES, outer, wire=wire)


def train(runtime: Runtime, way: str, saved_after: int | None) -> dict[str, Any]:
    """Train; saved after so many updates, and resumed in objects of its own, if that is wanted."""
    module, optimizers, diloco = new(way)
    with diloco:
        for number in range(LAST if saved_after is None else saved_after):
            update(module, optimizers, batch(runtime.rank, number))
        if saved_after is not None:
            diloco.state_dict()  # waits for what is under way
    if saved_after is not None:
        saved = module.state_dict(), optimizers[0].state_dict(), diloco.state_dict()
        module, optimizers, diloco = new(way)
        for part, state in zip((module, optimizers[0], diloco), saved, strict=True):
            part.load_state_dict(state)
        with diloco:
            for number in range(saved_after, LAST):
                update(module, optimizers, batch(runtime.rank, number))
    state = diloco.state_dict()
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with diloco.outer_weights():
        outer = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    same = all(torch.equal(own[name], tensor) for name, tensor in module.state_dict().items())
    return {"anchor": state["anchor"], "outer": outer, "own": own, "is_put_back": same, "round": diloco.round}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_hold_one_anchor_and_resume_bitwise(way: str) -> None:
    whole = on_ranks(train, 2, way, None)
    for name, tensor in whole[0]["anchor"].items():
        assert torch.equal(tensor, whole[1]["anchor"][name])
        assert torch.equal(tensor, whole[0]["outer"][name])
    assert not torch.equal(whole[0]["own"]["head.weight"], whole[1]["own"]["head.weight"])
    assert all(rank["is_put_back"] and rank["round"] == 3 for rank in whole)
    for saved_after in (7, 10):  # an average under way, or in fragments one that was brought back
        for resumed, expected in zip(on_ranks(train, 2, way, saved_after), whole, strict=True):
            for part in ("anchor", "own"):
                for name, tensor in expected[part].items():
                    assert torch.equal(resumed[part][name], tensor), (saved_after, name)


def take_outer_steps(runtime: Runtime, fragments: int) -> dict[str, Any]:
    module = Tied()
    optimizers = sgd(module)
    diloco = DiLoCo(module, optimizers, UPDATES, PLAIN_SGD, wire=Wire(fragments=fragments))
    for number in range(4):  # outside of the block, nothing is counted
        update(module, optimizers, batch(runtime.rank, number))
        diloco.outer_step()
    assert diloco.last_step
    return {"module": module.state_dict(), "bytes": diloco.last_step.bytes_sent}


def test_fragments_that_are_averaged_together_are_one() -> None:
    ((one, _), (three, _)) = (on_ranks(take_outer_steps, 2, fragments) for fragments in (1, 3))
    for name, tensor in one["module"].items():
        assert torch.equal(three["module"][name], tensor)
    beside = 4 * (1 + MARK_ELEMENTS)
    assert three["bytes"] == one["bytes"] + 2 * beside, "each fragment has a count of workers and a mark of the anchor"


def lose_a_peer(runtime: Runtime) -> str:
    module = Tied()
    optimizers = sgd(module)
    wire = Wire(delay_updates=2)
    with DiLoCo(module, optimizers, 3, wire=wire, timeout_seconds=10.0) as diloco:
        for number in range(6):
            if runtime.rank == 1 and number == 2:
                return ""  # gone before it has begun to average
            if number == 5:
                with pytest.raises(RuntimeError) as afterwards:
                    update(module, optimizers, batch(runtime.rank, number))
                return str(afterwards.value)
            if number == 4:
                with pytest.raises(PeerLostError) as raised:
                    update(module, optimizers, batch(runtime.rank, number))
                line = str(raised.value)
                assert line.startswith("outer step 1 on rank 0: rank 1 has left its loop after 2 updates of round 1"), (
                    line
                )
                continue
            update(module, optimizers, batch(runtime.rank, number))
    return f"{diloco.round}"


def test_a_lost_peer_is_reported_where_its_part_is_waited_for() -> None:
    line, _ = on_ranks(lose_a_peer, 2)
    assert "regroup those that are left" in line
