"""How `DiLoCo` ends: ranks that disagree or are lost, an exception in the block, updates that nobody averaged."""

from contextlib import suppress

import pytest
import torch

from adloco_dist import DiLoCo, OuterSGD, PeerLostError, RanksDisagreeError, Wire
from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Tied, batch, logged, on_ranks, sgd, update


def drift(runtime: Runtime, what: str, averager: Averager | None) -> tuple[str, str]:
    """In the second round something happens to rank 1 of three."""
    module = Tied()
    optimizers = sgd(module)
    with DiLoCo(module, optimizers, updates_per_round=2, outer=OuterSGD(1.0, 0.0), wire=Wire(averager)) as diloco:
        for number in range(4):
            if number == 3 and runtime.rank == 1:
                if what == "anchor":
                    diloco.state_dict()["anchor"]["head.bias"][2] += 1e-6
                else:
                    diloco.load_state_dict({**(state := diloco.state_dict()), "steps": state["steps"] + 1})
            if number < 3:
                update(module, optimizers, batch(runtime.rank, number))
        with pytest.raises(RanksDisagreeError) as raised:
            update(module, optimizers, batch(runtime.rank, 3))
        with pytest.raises(RuntimeError) as afterwards:
            diloco.outer_step()
    return str(raised.value), str(afterwards.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (
            "anchor",
            "after round 1: the anchor differs between ranks {0,2} and rank 1; restart all ranks,",
        ),
        (
            "round",
            "ranks are in different rounds, round 1 on ranks {0,2} and round 2 on rank 1; restart all",
        ),
    ],
)
@pytest.mark.parametrize("averager", [None, Sparse(), Quantized(WholeNumbers(8))])
def test_ranks_that_disagree_are_named_and_stop(what: str, line: str, averager: Averager | None) -> None:
    for refusal, afterwards in on_ranks(drift, 3, what, averager):
        assert refusal.startswith(line), refusal
        assert afterwards.startswith("an outer step has failed before; regroup those that are left, or restart all")


def lose(runtime: Runtime, how: str) -> str:
    """Rank 1 is gone in the second round, or late."""
    module = Tied()
    optimizers = sgd(module)
    timeout_seconds = 2.0 if how == "late" else 60.0
    with suppress(KeyError), DiLoCo(module, optimizers, updates_per_round=2, timeout_seconds=timeout_seconds):
        for number in range(3):
            update(module, optimizers, batch(runtime.rank, number))
        if runtime.rank == 1:
            if how == "late":
                runtime.store.get("reported")
            if how == "raises":
                raise KeyError("mine")
            return ""
        with pytest.raises(PeerLostError) as raised:
            update(module, optimizers, batch(runtime.rank, 3))
        runtime.store.set("reported", "")
        return str(raised.value)
    return ""


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("gone", "rank 1 has left its loop after 1 updates of round 2, and all ranks have to take the same number of"),
        (
            "raises",
            "rank 1 has left its loop after 1 updates of round 2 (KeyError: 'mine'), and all ranks",
        ),
        ("late", "another of the ranks {0,1} is gone, or late by more than timeout_seconds=2 ("),
    ],
)
def test_a_lost_rank_is_reported_with_what_to_do(how: str, what: str) -> None:
    """One that leaves is named at once: within the timeout of a minute, which nobody waits for."""
    line = on_ranks(lose, 2, how)[0]
    assert line.startswith(f"outer step 2 on rank 0: {what}"), line
    assert line.endswith("; regroup those that are left, or restart all and load the last state_dict")
    assert "\n" not in line


def leave(runtime: Runtime, how: str) -> tuple[int, bool, list[str]]:
    module = Tied()
    optimizers = sgd(module)
    messages = logged()
    diloco = DiLoCo(module, optimizers, updates_per_round=2)
    try:
        with diloco:
            for number in range(3):
                update(module, optimizers, batch(runtime.rank, number))
            if how == "exception" and runtime.rank == 1:  # alone: nobody waits for the other
                raise KeyError("the user's own")
            if how == "outer step":
                diloco.outer_step()
    except KeyError as error:
        messages.append(str(error))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    update(module, optimizers, batch(runtime.rank, 3))  # it counts no more
    moved = any(not torch.equal(x, y) for x, y in zip(before, module.parameters(), strict=True))
    return diloco.round, moved, messages


def test_leaving_the_block_takes_no_outer_step() -> None:
    warning = (
        "1 updates since the last outer step are in this rank's model alone; to average them, call outer_step() on all "
        "ranks at the end of the loop"
    )
    assert on_ranks(leave, 2, "") == [(1, True, [warning])] * 2
    assert on_ranks(leave, 2, "exception") == [(1, True, [warning]), (1, True, ['"the user\'s own"'])]
    assert on_ranks(leave, 2, "outer step") == [(2, True, [])] * 2
