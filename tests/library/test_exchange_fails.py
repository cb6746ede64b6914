"""A rank that goes in the middle of an exchange: on all ranks the state is what it was before the exchange."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco_dist import DiLoCo, OuterSGD, Wire
from adloco_dist.averaging.averager import Averager, Commit, FullPrecision
from adloco_dist.averaging.codecs import BFloat16, WholeNumbers
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.inside_first import InsideFirst
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, Normed, adamw, batch, on_ranks, update

UPDATES, DELAY = 4, 2
NODES = (0, 0, 1)
WIRES: dict[str, tuple[Averager, str, int]] = {
    "fp32": (FullPrecision(), "all_reduce", 1),
    "bf16": (Quantized(BFloat16()), "exchange_tensors", 2),
    "int8": (Quantized(WholeNumbers(8)), "exchange_tensors", 2),
    "int4": (Quantized(WholeNumbers(4)), "exchange_tensors", 1),
    "int4 with feedback": (Quantized(WholeNumbers(4), keeps_residual=True), "exchange_tensors", 2),
    "sparse": (Sparse(0.1), "exchange_tensors", 1),
    "sum of sparse": (Sparse(0.1), "exchange_tensors", 2),
    "int4 inside first": (InsideFirst(Quantized(WholeNumbers(4)), NODES), "among", 1),
    "sparse inside first": (InsideFirst(Sparse(0.1), NODES), "among", 1),
}
"""Each with what the last rank does not come to any more, at which call: others have sent it something, or wait."""


class Leaving:
    """An averager whose rank closes its connections in the middle of an exchange, once it is told to."""

    def __init__(self, averager: Averager, last_call: str, number: int) -> None:
        self._averager, self._last_call, self._number = averager, last_call, number
        self.keeps_residual = averager.keeps_residual
        self.leaves = False

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        call, numbers = getattr(group, self._last_call), count(1)

        def leave(*arguments: object) -> None:
            if next(numbers) < self._number:
                call(*arguments)
                return
            dist.destroy_process_group(group.process_group)
            raise ConnectionError("the link is gone")

        if self.leaves:
            setattr(group, self._last_call, leave)
        return self._averager.exchange(payload, num_exact, group, residual)

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        return self._averager.bytes_per_rank(num_elements, num_exact, ranks)


def bits(value: Any) -> Any:
    """A copy of nested tensors, of which NaN equals itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {name: bits(part) for name, part in value.items()}
    return [bits(part) for part in value] if isinstance(value, list) else copy.deepcopy(value)


def differing(before: Any, after: Any) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def lose_a_rank(runtime: Runtime, name: str, take: Callable[..., list[str]]) -> list[str]:
    module = Normed()
    optimizers = adamw(module)
    averager, last_call, number = WIRES[name]
    leaving = Leaving(averager, last_call, number)
    outer = PLAIN if averager.keeps_residual else OuterSGD()
    wire = Wire(leaving, delay_updates=DELAY if take is delayed else 0)
    diloco = DiLoCo(module, optimizers, UPDATES, outer, wire=wire, timeout_seconds=30)
    with diloco:
        for number in range(2 * UPDATES + 3):
            update(module, optimizers, batch(runtime.rank, number))
        leaving.leaves = runtime.rank == runtime.world_size - 1
        return take(runtime, diloco, module, optimizers)


def waiting(runtime: Runtime, diloco: DiLoCo, module: Normed, optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """What differs after an outer step that failed."""

    def everything() -> dict[str, Any]:
        return bits({**diloco.state_dict(), "model": module.state_dict(), "optimizer": optimizers[0].state_dict()})

    if runtime.rank == 1:  # it is left out, and would restart
        module.head.bias.data[0] = float("nan")
    before = everything()
    with pytest.raises((RuntimeError, ConnectionError)):
        diloco.outer_step()
    return differing(before, everything())


def delayed(runtime: Runtime, diloco: DiLoCo, module: Normed, optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """What differs after an average that was started and never came; the worker goes on as if there had been none."""

    def kept() -> dict[str, Any]:
        names = ("anchor", "momentum", "residual", "departed", "buffers", "steps", "awaits")
        return bits({name: value for name, value in diloco.state_dict().items() if name in names})

    before, alone = kept(), copy.deepcopy(module)
    own = adamw(alone)
    own[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    rows = [batch(runtime.rank, 100 + number) for number in range(1 + DELAY)]
    for number in range(1 + DELAY):
        update(alone, own, rows[number])
    for number in range(DELAY):
        update(module, optimizers, rows[number])
    with pytest.raises((RuntimeError, ConnectionError)):
        update(module, optimizers, rows[DELAY])
    return differing({**before, "model": bits(alone.state_dict())}, {**kept(), "model": bits(module.state_dict())})


@pytest.mark.parametrize("take", [waiting, delayed])
@pytest.mark.parametrize("name", WIRES)
def test_an_exchange_that_fails_leaves_all_state_as_it_was(name: str, take: Callable[..., list[str]]) -> None:
    assert on_ranks(lose_a_rank, len(NODES), name, take) == [[], [], []]
