"""Optimizers of others: when an update is over, and what they keep beside the parameters."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adloco_dist import DiLoCo, OuterSGD, Streaming
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Normed, Tied, adamw, batch, loss, on_ranks, sgd, update

pytestmark = pytest.mark.stranger
PLAIN = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


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


# Optimizers that keep copies of the parameters.


class ScheduleFreeSGD(Optimizer):
    """The parameters are the mean of the states z (Defazio et al., 2405.15682, with beta 1)."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(z=parameter.detach().clone(), k=0)
                state["k"] += 1
                state["z"].sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(state["z"], 1 / state["k"])


class Lookahead(Optimizer):
    """Every second step goes half of the way back to the slow weights (Zhang et al., 1907.08610)."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(slow=parameter.detach().clone(), k=0)
                parameter.sub_(parameter.grad, alpha=group["lr"])
                state["k"] += 1
                if state["k"] % 2 == 0:
                    parameter.copy_(state["slow"].lerp_(parameter, 0.5))


class Masters(Optimizer):
    """Trains bf16 parameters in fp32."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float()
                parameter.copy_(state["master"].sub_(parameter.grad.float(), alpha=group["lr"]))


KEEPING_COPIES: dict[str, tuple[Callable[[Iterator[nn.Parameter]], Optimizer], str, torch.dtype]] = {
    "schedule-free": (ScheduleFreeSGD, "z", torch.float64),
    "lookahead": (Lookahead, "slow", torch.float64),
    "fp32 masters": (Masters, "master", torch.bfloat16),
}


def train_with_copies(runtime: Runtime, name: str, delay: int, gradients: Sequence[float]) -> dict[str, Any]:
    """Each worker has a constant gradient of its own, so that means over workers are known."""
    make, key, dtype = KEEPING_COPIES[name]
    module = nn.Linear(4, 1, bias=False, dtype=dtype)
    nn.init.constant_(module.weight, 1.0)
    optimizer = make(module.parameters())
    with DiLoCo(module, optimizer, 2, outer=PLAIN, streaming=Streaming(delay_updates=delay)) as diloco:
        for _ in range(8):
            module.weight.grad = torch.full_like(module.weight, gradients[runtime.rank])
            optimizer.step()
        diloco.outer_step()
    return {
        "weight": module.weight.detach().double(),
        "copy": optimizer.state[module.weight][key].double(),
        "names": diloco.state_dict()["copies"],
    }


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", KEEPING_COPIES)
def test_copies_of_parameters_move_with_them(name: str, delay: int) -> None:
    """These optimizers are linear in gradients, so two workers come to what one does with the mean of theirs."""
    (alone,) = on_ranks(train_with_copies, 1, name, 0, [0.2])
    tolerance = 0.01 if name == "fp32 masters" else 1e-12
    two = on_ranks(train_with_copies, 2, name, delay, [0.1, 0.3])
    mean_of_copies = torch.stack([found["copy"] for found in two]).mean(0)
    torch.testing.assert_close(mean_of_copies, alone["copy"], rtol=0, atol=tolerance)
    for found in two:
        assert found["names"] == [KEEPING_COPIES[name][1]]
        torch.testing.assert_close(found["weight"], alone["weight"], rtol=0, atol=tolerance)


TORCHS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, amsgrad=True),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, weight_decay=1.0),
    "adagrad": lambda module: torch.optim.Adagrad(module.parameters(), lr=1e-3),
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda module: torch.optim.Rprop(module.parameters(), lr=1e-3),
    "nadam": lambda module: torch.optim.NAdam(module.parameters(), lr=1e-3),
}


def look_for_copies(runtime: Runtime, name: str, only_decays: bool) -> list[str]:
    module = Tied()
    optimizer = TORCHS[name](module)
    with DiLoCo(module, optimizer, 2) as diloco:
        if only_decays:  # the gradient is the parameter itself
            sum(parameter.square().sum() / 2 for parameter in module.parameters()).backward()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            loss(module, batch(0, 0)).backward()
        optimizer.step()
    return diloco.state_dict()["copies"]


@pytest.mark.parametrize("only_decays", [False, True])
@pytest.mark.parametrize("name", TORCHS)
def test_moments_are_no_copies(name: str, only_decays: bool) -> None:
    assert on_ranks(look_for_copies, 1, name, only_decays) == [[]]


# What is refused, or said.


def add_later(runtime: Runtime, what: str) -> str:
    module = Normed()
    (optimizer,) = sgd(module)
    diloco = DiLoCo(module, optimizer, 2)
    update(module, [optimizer], batch(runtime.rank, 0))
    if what == "a module":
        module.add_module("late", nn.Linear(2, 2))
        optimizer.add_param_group({"params": list(module.get_submodule("late").parameters())})
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError) as raised:
        diloco.outer_step()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a module", "optimizer: it holds late.weight, which it did not at construction; construct DiLoCo when"),
        ("a parameter", "optimizer: it holds 1 parameters that are not the model's, which it did not at construction;"),
    ],
)
def test_parameters_that_come_later_are_refused(what: str, line: str) -> None:
    for refusal in on_ranks(add_later, 2, what):
        assert refusal.startswith(line), refusal


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("adloco_dist.diloco").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def forget_the_block(runtime: Runtime, how: str) -> list[str]:
    logged = Logged()
    module = Tied()
    optimizers = adamw(module)
    diloco = DiLoCo(module, optimizers, 2)
    if how == "with a block first":
        with diloco:
            pass
    for number in range(4):
        update(module, optimizers, batch(runtime.rank, number))
        if how == "counted by hand":
            diloco.count_update()
    return logged.lines


@pytest.mark.parametrize(("how", "is_said"), [("", True), ("counted by hand", False), ("with a block first", False)])
def test_a_forgotten_block_is_said(how: str, is_said: bool) -> None:
    for lines in on_ranks(forget_the_block, 2, how):
        said = [line for line in lines if line.startswith("the optimizer steps outside of a block of DiLoCo: nothing")]
        assert len(said) == is_said, lines


def evaluate_and_raise(runtime: Runtime, streaming: Streaming) -> bool:
    module = Normed()
    optimizers = adamw(module)
    with DiLoCo(module, optimizers, 4, streaming=streaming) as diloco:
        for number in range(6):
            update(module, optimizers, batch(runtime.rank, number))
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(KeyError), diloco.outer_weights():
            assert not torch.equal(module.head.weight, before["head.weight"])
            raise KeyError
        same = all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
        diloco.outer_step()
    return same


@pytest.mark.parametrize("delay", [0, 2])
def test_an_evaluation_that_raises_leaves_nothing_behind(delay: int) -> None:
    assert on_ranks(evaluate_and_raise, 2, Streaming(delay_updates=delay)) == [True] * 2
