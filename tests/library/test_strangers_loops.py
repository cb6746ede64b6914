"""Loops that others write around `DiLoCo`: they train right, or one line says why not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adloco_dist import DiLoCo, NoiseScale, OuterSGD, PeerLostError, Streaming
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Tied, adamw, batch, logged, loss, on_ranks, sgd, update

pytestmark = pytest.mark.stranger
PLAIN = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
STREAMING = {
    "plain": Streaming(),
    "delayed": Streaming(delay_updates=2),
    "in fragments": Streaming(fragments=2),
    "in fragments, delayed": Streaming(fragments=2, delay_updates=1),
}


def values(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def same_on_all_ranks(module: nn.Module) -> bool:
    lowest = values(module)
    dist.broadcast(lowest, 0)
    is_same = torch.tensor(int(torch.equal(lowest, values(module))))
    dist.all_reduce(is_same, dist.ReduceOp.MIN)
    return bool(is_same)


# The loop's own collectives, beside averages that travel.


def sum_a_number(runtime: Runtime, number: int) -> bool:
    total = torch.tensor(float(runtime.rank + 1))
    dist.all_reduce(total)
    return float(total) == sum(range(1, runtime.world_size + 1))


def meet_at_a_barrier(runtime: Runtime, number: int) -> bool:
    dist.barrier()
    return True


def gather_objects(runtime: Runtime, number: int) -> bool:
    gathered: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(gathered, (runtime.rank, number))
    return gathered == [(rank, number) for rank in range(runtime.world_size)]


def reduce_many_elements(runtime: Runtime, number: int) -> bool:
    total = torch.ones(1 << 16)
    dist.all_reduce(total)
    return bool((total == runtime.world_size).all())


def broadcast_from_the_last(runtime: Runtime, number: int) -> bool:
    sent = torch.tensor(number if runtime.rank == runtime.world_size - 1 else -1)
    dist.broadcast(sent, runtime.world_size - 1)
    return int(sent) == number


def pass_round(runtime: Runtime, number: int) -> bool:
    size, received = runtime.world_size, torch.tensor(-1)
    work = dist.isend(torch.tensor(runtime.rank), (runtime.rank + 1) % size)
    dist.recv(received, (runtime.rank - 1) % size)
    assert work is not None
    work.wait()
    return int(received) == (runtime.rank - 1) % size


COLLECTIVES = {
    "all-reduce of a loss": sum_a_number,
    "barrier": meet_at_a_barrier,
    "objects": gather_objects,
    "large all-reduce": reduce_many_elements,
    "broadcast": broadcast_from_the_last,
    "send and receive": pass_round,
}


def train_with_collectives(runtime: Runtime, name: str | None, streaming: str) -> dict[str, Any]:
    """The slower rank comes late to every third average."""
    module = Tied()
    optimizers = adamw(module)
    averager = Quantized(WholeNumbers(8))
    right = True
    with DiLoCo(
        module, optimizers, updates_per_round=4, streaming=STREAMING[streaming], averager=averager, timeout_seconds=30
    ) as diloco:
        for number in range(24):
            update(module, optimizers, batch(runtime.rank, number))
            if name:
                right = COLLECTIVES[name](runtime, number) and right
        diloco.outer_step()
    return {"values": values(module), "right": right, "same": same_on_all_ranks(module)}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_the_loop_meet_none_of_an_average(name: str) -> None:
    wanted = on_ranks(train_with_collectives, 2, None, "in fragments, delayed")
    for found, alone in zip(on_ranks(train_with_collectives, 2, name, "in fragments, delayed"), wanted, strict=True):
        assert found["right"]
        assert found["same"]
        assert torch.equal(found["values"], alone["values"])


def train_two_models(runtime: Runtime, streaming: str) -> dict[str, bool]:
    """Two DiLoCos of different lengths, one of which is updated every other time."""
    one, other = Tied(), Tied(width=4)
    optimizers = adamw(one), adamw(other)
    settings: dict[str, Any] = {"streaming": STREAMING[streaming], "timeout_seconds": 30}
    first, second = DiLoCo(one, optimizers[0], 4, **settings), DiLoCo(other, optimizers[1], 6, **settings)
    with first, second:
        for number in range(24):
            update(one, optimizers[0], batch(runtime.rank, number))
            if number % 2:
                update(other, optimizers[1], batch(runtime.rank, number))
        first.outer_step()
        second.outer_step()
    return {"one": same_on_all_ranks(one), "other": same_on_all_ranks(other)}


@pytest.mark.parametrize("streaming", STREAMING)
def test_two_models_are_averaged_side_by_side(streaming: str) -> None:
    for found in on_ranks(train_two_models, 2, streaming):
        assert found == {"one": True, "other": True}


def measure_noise(runtime: Runtime) -> tuple[bool, int]:
    module = Tied()
    optimizers = sgd(module)
    noise, measured = NoiseScale(module, every_updates=1), 0
    with DiLoCo(module, optimizers, 4, streaming=STREAMING["delayed"], timeout_seconds=30) as diloco:
        for number in range(24):
            loss(module, batch(runtime.rank, number)).backward()
            noise.observe(4)
            measured += noise.update() is not None
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        diloco.outer_step()
    return same_on_all_ranks(module), measured


def test_the_noise_scale_is_measured_beside_averages_that_travel() -> None:
    assert on_ranks(measure_noise, 2) == [(True, 24)] * 2


def train_with_uneven_groups(runtime: Runtime) -> bool:
    """Rank 0 has formed a group that rank 1 is not in: they have formed different numbers of groups."""
    dist.new_group([0])
    module = Tied()
    optimizers = sgd(module)
    with DiLoCo(module, optimizers, 4, timeout_seconds=30) as diloco:
        for number in range(8):
            update(module, optimizers, batch(runtime.rank, number))
    return diloco.holds_anchor and same_on_all_ranks(module)


def test_ranks_may_have_formed_different_numbers_of_groups() -> None:
    assert on_ranks(train_with_uneven_groups, 3) == [True] * 3


# What the model holds at the end, and that nothing travels any more.


def end(runtime: Runtime, streaming: str, how: str) -> dict[str, Any]:
    module = Tied()
    optimizers = sgd(module)
    diloco = DiLoCo(module, optimizers, 4, streaming=STREAMING[streaming], outer=PLAIN, timeout_seconds=30)

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
        with DiLoCo(module, optimizers, 4, streaming=STREAMING[streaming], timeout_seconds=600):
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

    def all_reduce(
        self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return payload.view(2, 0)


def average_with_an_error(runtime: Runtime) -> str:
    module = Tied()
    diloco = DiLoCo(module, sgd(module), 4, averager=Broken(), outer=PLAIN)
    with diloco, pytest.raises(RuntimeError) as raised:
        diloco.outer_step()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_does_not_call_its_own_error_anothers_death() -> None:
    for line in on_ranks(average_with_an_error, 2):
        assert line.startswith("RuntimeError: shape '[2, 0]' is invalid"), line
