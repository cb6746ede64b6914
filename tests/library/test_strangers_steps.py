"""When an update of a stranger's loop is over, in which several optimizers step, or some within the backward pass."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adloco_dist import DiLoCo
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, on_ranks

pytestmark = pytest.mark.stranger


def two_layers(fused: bool = False) -> tuple[nn.ModuleDict, list[Optimizer]]:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    return module, [torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused) for layer in module.values()]


# Several optimizers: an outer step never falls between those of one update.


def step_both(runtime: Runtime, skipped: Sequence[tuple[int, int]], fused: bool) -> list[list[int]]:
    """For each update, how many outer steps had been taken before it, between its optimizers, and after it."""
    module, optimizers = two_layers(fused)
    seen = []
    with DiLoCo(module, optimizers, updates_per_round=2, outer=PLAIN) as diloco:
        for number in range(12):
            module["b"](module["a"](torch.ones(1, 2))).sum().backward()
            rounds = [diloco.round]
            for place, optimizer in enumerate(optimizers):
                if fused:  # as GradScaler tells a fused optimizer not to take the step
                    optimizer.found_inf = torch.tensor(float((number, place) in skipped))  # pyright: ignore[reportAttributeAccessIssue]
                if fused or (number, place) not in skipped:
                    optimizer.step()
                rounds.append(diloco.round)
            for optimizer in optimizers:
                optimizer.zero_grad()
            seen.append(rounds)
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "skipped", [[], [(0, 0)], [(1, 0)], [(0, 1)], [(3, 1)], [(0, 0), (1, 0)], [(2, 0), (5, 1)], [(4, 0), (4, 1)]]
)
def test_an_outer_step_is_never_taken_between_two_optimizers(skipped: list[tuple[int, int]], fused: bool) -> None:
    (seen,) = on_ranks(step_both, 1, skipped, fused)
    assert all(before == between for before, between, _ in seen)
    lost = sum(place == 1 for _, place in skipped)
    assert seen[-1][-1] == (12 - lost) // 2


def step_in_another_order(runtime: Runtime, set_to_none: bool) -> str:
    module, optimizers = two_layers()
    with DiLoCo(module, optimizers, updates_per_round=3, outer=PLAIN):
        try:
            for _ in range(12):
                module["b"](module["a"](torch.ones(1, 2))).sum().backward()
                for optimizer in reversed(optimizers):
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none)
        except ValueError as error:
            return str(error)
    return "trained"


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_list_in_another_order_than_the_steps_is_refused(set_to_none: bool) -> None:
    (line,) = on_ranks(step_in_another_order, 1, set_to_none)
    assert line == (
        "optimizer: its number 1 steps after its last one in the same update; list optimizers in the order in which "
        "the loop steps them"
    )


def train_alternately(runtime: Runtime, critic_steps: int) -> int:
    """Each optimizer has a backward pass of its own, and the first one several of them."""
    module, (critic, generator) = two_layers()
    with DiLoCo(module, [critic, generator], updates_per_round=2, outer=PLAIN) as diloco:
        for _ in range(6):
            for optimizer in [critic] * critic_steps + [generator]:
                module["b"](module["a"](torch.ones(1, 2))).sum().backward()
                optimizer.step()
                module.zero_grad()
    return diloco.round


@pytest.mark.parametrize("critic_steps", [1, 5])
def test_optimizers_may_step_in_turn(critic_steps: int) -> None:
    assert on_ranks(train_alternately, 1, critic_steps) == [3]


# Steps within the backward pass.


class Towers(nn.Module):
    """Two towers, of which the second is used in some updates only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))

    def forward(self, inputs: torch.Tensor, uses_both: bool) -> torch.Tensor:
        return self.a(inputs) + (self.b(inputs) if uses_both else 0)


def step_in_backward(runtime: Runtime, skips: bool) -> dict[str, Any]:
    """An optimizer for each parameter, which steps in a hook of its gradient."""
    module = Towers()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in module.parameters()}
    taken_in_backward = []
    with DiLoCo(module, list(optimizers.values()), updates_per_round=4, timeout_seconds=60) as diloco:

        def step(parameter: torch.Tensor) -> None:
            rounds = diloco.round
            optimizers[parameter].step()  # pyright: ignore[reportArgumentType]
            optimizers[parameter].zero_grad()  # pyright: ignore[reportArgumentType]
            taken_in_backward.append(diloco.round != rounds)

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(16):
            generator = torch.Generator().manual_seed(100 * runtime.rank + number)
            inputs = torch.randn(8, 8, generator=generator)
            uses_both = not (skips and runtime.rank == 1 and number in (2, 7))
            (module(inputs, uses_both) - inputs.sum(1, keepdim=True)).square().mean().backward()
            assert (diloco.round, diloco.updates) == divmod(number + 1, 4)
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return {"values": flat, "in backward": any(taken_in_backward)}


def step_afterwards(runtime: Runtime, skips: bool) -> torch.Tensor:
    """The same, with one optimizer after each backward pass."""
    module = Towers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with DiLoCo(module, optimizer, updates_per_round=4):
        for number in range(16):
            generator = torch.Generator().manual_seed(100 * runtime.rank + number)
            inputs = torch.randn(8, 8, generator=generator)
            uses_both = not (skips and runtime.rank == 1 and number in (2, 7))
            (module(inputs, uses_both) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("skips", [False, True])
def test_optimizers_that_step_in_the_backward_pass_are_averaged_after_it(skips: bool) -> None:
    wanted = on_ranks(step_afterwards, 2, skips)
    for found, values in zip(on_ranks(step_in_backward, 2, skips), wanted, strict=True):
        assert not found["in backward"]
        torch.testing.assert_close(found["values"], values, rtol=1e-6, atol=1e-7)
