"""Loops that others write around `DiLoCo`: they train right, or one line says why not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco_dist import DiLoCo, NoiseScale
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import STREAMING, Tied, adamw, batch, loss, on_ranks, same_on_all_ranks, sgd, update, values

pytestmark = pytest.mark.stranger


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
    wire = replace(STREAMING[streaming], averager=Quantized(WholeNumbers(8)))
    right = True
    with DiLoCo(module, optimizers, updates_per_round=4, wire=wire, timeout_seconds=30) as diloco:
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
    settings: dict[str, Any] = {"wire": STREAMING[streaming], "timeout_seconds": 30}
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
    with DiLoCo(module, optimizers, 4, wire=STREAMING["delayed"], timeout_seconds=30) as diloco:
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
