"""How loops of others end: what the model holds, that nothing travels any more, and who is named."""

from typing import Any

import pytest
import torch

from adloco_dist import DiLoCo, PeerLostError, Wire
from adloco_dist.averaging.averager import Commit
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, STREAMING, Tied, batch, logged, on_ranks, same_on_all_ranks, sgd, update, values

pytestmark = pytest.mark.stranger


def end(runtime: Runtime, streaming: str, how: str) -> dict[str, Any]:
    module = Tied()
    optimizers = sgd(module)
    diloco = DiLoCo(module, optimizers, 4, wire=STREAMING[streaming], outer=PLAIN, timeout_seconds=30)

    messages = logged()
    with diloco:
        for number in range(8):
            update(module, optimizers, batch(runtime.rank, number))
        if how == "outer step":
            diloco.outer_step()
    if how == "outer step afterwards":
        diloco.outer_step()
    with diloco.outer_weights():
        anchor, anchor_is_same = values(module), same_on_all_ranks(module)
    return {
        "said": bool(messages),
        "same": same_on_all_ranks(module),
        "is anchor": torch.equal(anchor, values(module)),
        "holds anchor": diloco.holds_anchor,
        "anchor is same": anchor_is_same,
    }


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("how", ["", "outer step", "outer step afterwards"])
def test_at_the_end_it_is_known_and_said_what_the_model_holds(streaming: str, how: str) -> None:
    is_averaged = streaming == "plain" or bool(how)
    for found in on_ranks(end, 2, streaming, how):
        assert found["anchor is same"]
        assert found["same"] == found["is anchor"] == found["holds anchor"] == is_averaged
        assert found["said"] == (streaming != "plain" and how != "outer step")


def raise_in_the_middle(runtime: Runtime, streaming: str) -> str:
    """Rank 1 raises; rank 0 goes on, and must not wait for the timeout."""
    module = Tied()
    optimizers = sgd(module)
    try:
        with DiLoCo(module, optimizers, 4, wire=STREAMING[streaming], timeout_seconds=600):
            for number in range(16):
                if runtime.rank == 1 and number == 6:
                    raise FileNotFoundError("its data")
                update(module, optimizers, batch(runtime.rank, number))
    except FileNotFoundError as error:
        return str(error)
    except PeerLostError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("streaming", STREAMING)
def test_a_rank_that_leaves_by_an_exception_is_named_by_the_others(streaming: str) -> None:
    other, own = on_ranks(raise_in_the_middle, 2, streaming)
    assert own == "its data"
    assert "rank 1 has left its loop after 2 updates of round 2 (FileNotFoundError: its data)" in other


def be_interrupted(runtime: Runtime) -> dict[str, Any]:
    """Both ranks are interrupted while an average travels, and evaluate what they have."""
    module = Tied()
    optimizers = sgd(module)
    diloco = DiLoCo(module, optimizers, 4, wire=STREAMING["delayed"], outer=PLAIN, timeout_seconds=60)
    anchors = []
    with pytest.raises(KeyboardInterrupt), diloco:
        for number in range(8):
            update(module, optimizers, batch(runtime.rank, number))
            if number == 6:  # the first average has arrived, the second not begun
                with diloco.outer_weights():
                    anchors.append(values(module))
        raise KeyboardInterrupt
    own = values(module)
    with diloco.outer_weights():
        anchors.append(values(module))
    with pytest.raises(RuntimeError) as raised:
        diloco.outer_step()
    awaits = diloco.state_dict()["awaits"]
    return {"anchors": anchors, "kept": torch.equal(own, values(module)), "said": str(raised.value), "awaits": awaits}


def test_a_loop_that_is_interrupted_has_the_average_before() -> None:
    one, other = on_ranks(be_interrupted, 2)
    for found in (one, other):
        assert torch.equal(found["anchors"][0], found["anchors"][1])
        assert found["kept"]
        assert found["said"].startswith("an outer step has failed before; regroup those that are left")
        assert found["awaits"] is None, "its state is that before the average"
    assert torch.equal(one["anchors"][1], other["anchors"][1])


def run_out_of_data(runtime: Runtime, num_batches: int) -> str:
    module = Tied()
    optimizers = sgd(module)
    try:
        with DiLoCo(module, optimizers, 4, timeout_seconds=600):
            for number in range(num_batches if runtime.rank == 1 else 20):
                update(module, optimizers, batch(runtime.rank, number))
    except PeerLostError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(("num_batches", "where"), [(9, "1 updates of round 3"), (12, "0 updates of round 4")])
def test_a_rank_that_has_fewer_batches_is_named_by_the_others(num_batches: int, where: str) -> None:
    other, own = on_ranks(run_out_of_data, 2, num_batches)
    assert own == "trained"
    assert f"rank 1 has left its loop after {where}, and all ranks have to take the same number of updates" in other


def skip_batches(runtime: Runtime, error: type[Exception]) -> str:
    """Rank 1 skips a batch that does not fit, as many loops do, and so takes an update less."""
    module = Tied()
    optimizers = sgd(module)
    try:
        with DiLoCo(module, optimizers, 4, timeout_seconds=600):
            for number in range(8):
                try:
                    if runtime.rank == 1 and number == 2:
                        raise error("of this batch")
                    update(module, optimizers, batch(runtime.rank, number))
                except error:
                    continue
    except PeerLostError as lost:
        return str(lost)
    return "trained"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_a_rank_that_skips_a_batch_is_named_by_the_others(error: type[Exception]) -> None:
    other, own = on_ranks(skip_batches, 2, error)
    assert own == "trained"
    assert "rank 1 has left its loop after 3 updates of round 2" in other


class Broken(Sparse):
    """An averager with an error of its own."""

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        payload = payload.view(2, 0)
        return lambda: payload


def average_with_an_error(runtime: Runtime) -> str:
    module = Tied()
    diloco = DiLoCo(module, sgd(module), 4, wire=Wire(Broken()), outer=PLAIN)
    with diloco, pytest.raises(RuntimeError) as raised:
        diloco.outer_step()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_does_not_call_its_own_error_anothers_death() -> None:
    for line in on_ranks(average_with_an_error, 2):
        assert line.startswith("RuntimeError: shape '[2, 0]' is invalid"), line
