"""A loop of one's own with `DiLoCo` trains what the launcher trains, by the same outer steps."""

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from adloco_dist import DiLoCo, OuterSGD
from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.fragments import largest
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.in_place import AveragedBuffers, InPlace
from adloco_dist.averaging.outer_step import OuterStep
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from helpers.launched import ClippedUpdates, batches, new_adamw, parameters, train_and_unflatten
from helpers.lone import lone_trainer
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, small_module, small_objective, small_settings, small_store

ROUNDS, UPDATES, LOCAL_BATCH = 5, 3, 2


def train_by_loop(runtime: Runtime) -> list[np.ndarray]:
    module = small_module(small_settings()).double()
    optimizers = new_adamw(module)
    take_update = ClippedUpdates(batches(ROUNDS * UPDATES, runtime.world_size * LOCAL_BATCH), LOCAL_BATCH)
    with DiLoCo(module, optimizers, updates_per_round=UPDATES):
        for number in range(ROUNDS * UPDATES):
            take_update(module, optimizers, runtime.rank, number)
    return [parameter.numpy() for parameter in parameters(module)]


def test_a_loop_of_ones_own_is_the_launchers_run() -> None:
    overrides = ("pool.workers_per_trainer=2", "inner.lr=5e-3", f"budget={ROUNDS}rounds")
    launched = run_ranks(train_and_unflatten, [0, 0], *overrides)
    for mine, theirs in zip(run_ranks(train_by_loop, [0, 0]), launched, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


WIRES: dict[str, tuple[tuple[str, ...], Averager]] = {
    "fp64": (("wire=fp32",), FullPrecision(torch.float64)),
    "bf16": (("wire=bf16",), Quantized(BFloat16())),
    "int8": (("wire=int8",), Quantized(WholeNumbers(8))),
    "int4": (("wire=int4",), Quantized(WholeNumbers(4))),
    "sparse": (("wire=sparse", "wire.fraction=0.1"), Sparse(0.1)),
}
TIMES = {
    "waiting": ("wire.fragments=1",),
    "in fragments": ("wire.fragments=2",),
    "delayed": ("wire.delay_updates=1",),
    "in fragments, delayed": ("wire.fragments=2", "wire.delay_updates=1"),
}
WEIGHTS = (1.0, 0.25)
"""Of the two workers: the second takes a quarter of the updates."""


class Ordered(nn.Module):
    """Matrices before vectors, as the launcher's vectors have them, and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("first", (40, 50)), ("second", (70, 30)), ("third", (33,)), ("fourth", (5,))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        self.register_buffer("mean", torch.zeros(7, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def learn(module: nn.Module, rank: int, number: int) -> None:
    """What an update changes."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    with torch.no_grad():
        for tensor in (*module.parameters(), module.get_buffer("mean")):
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64), alpha=1e-2)
        module.get_buffer("count").add_(1)


def in_place(module: nn.Module, settings: Settings, averager: Averager) -> OuterStep[InPlace]:
    """As DiLoCo sets it up."""
    parameters = TrainedParameters(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
    buffers, division = AveragedBuffers(module), parameters.division(settings.wire.fragments, (0, 1), 60)
    replica = InPlace(parameters, buffers, largest(division.fragments) if settings.wire.is_delayed else 0)
    optimizer = OuterSGD(settings.outer.lr, settings.outer.momentum)
    return OuterStep([replica], parameters.vector(), division, optimizer, averager, buffers)


def state(step: OuterStep[Any], module: nn.Module) -> list[np.ndarray]:
    boundary = sum(fragment.num_elements for fragment in step.fragments)
    vectors = [vector[:boundary] for vector in (step.anchor, step.momentum, step.residual) if vector is not None]
    return [tensor.numpy(force=True).copy() for tensor in (*vectors, *module.state_dict().values())]


def step_both(runtime: Runtime, wire: str, times: str) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """The states of both after every update, of which each averages a fragment."""
    overrides, averager = WIRES[wire]
    outer = "outer=average" if averager.keeps_residual else "outer=nesterov"
    settings = small_settings(*FOUR_TRAINERS, *overrides, *TIMES[times], outer, "algorithm.updates_per_round=6")
    groups = [group_of(cast(dist.ProcessGroup, dist.new_group()), torch.device("cpu"), 60) for _ in range(2)]
    module, own = Ordered(), Ordered()
    changing = ("mean", "count")
    trainer, slot = lone_trainer(
        settings, small_objective(settings), module, small_store(), [runtime.rank], changing=changing
    )
    slot.flat_model.point_at(trainer.workers[0].weights)
    steps: list[tuple[OuterStep[Any], nn.Module]] = [(trainer, module), (in_place(own, settings, averager), own)]
    for step, _ in steps:
        step.workers[0].weight = WEIGHTS[runtime.rank]
    found = []
    for number in range(7):
        index = number % settings.wire.fragments
        for (step, updated), group in zip(steps, groups, strict=True):
            learn(updated, runtime.rank, number)
            if updated is module:
                slot.flat_model.store_buffers()
            step.mix_awaited()
            if settings.wire.is_delayed:
                step.start(index, group, is_delayed=True)
                step.begin()
            else:
                step.step(index, group)
            if updated is module:
                slot.flat_model.load_buffers()
        found.append((state(*steps[0]), state(*steps[1])))
    for step, _ in steps:
        step.mix_awaited()
    slot.flat_model.load_buffers()
    return [*found, (state(*steps[0]), state(*steps[1]))]


def step_both_with_each(runtime: Runtime, times: str) -> dict[str, Any]:
    return {wire: step_both(runtime, wire, times) for wire in WIRES}


@pytest.mark.parametrize("times", TIMES)
def test_workers_in_place_and_flat_workers_take_the_same_steps(times: str) -> None:
    """To the bit, with unequal weights and buffers, in every format."""
    for rank in run_ranks(step_both_with_each, [0, 1], times):
        for wire, states in rank.items():
            for number, (flat, own) in enumerate(states):
                for place, (one, other) in enumerate(zip(flat, own, strict=True)):
                    assert np.array_equal(one, other), (wire, number, place)
            (first, *_), (last, *_) = states[0][0], states[-1][0]
            assert not np.array_equal(first, last)
