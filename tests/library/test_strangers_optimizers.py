"""What optimizers of others keep beside the parameters, and what is refused or said of a stranger's loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adloco_dist import DiLoCo, Wire
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, Normed, Tied, adamw, batch, logged, loss, on_ranks, sgd, update

pytestmark = pytest.mark.stranger


# Optimizers that keep copies of the parameters.


class KeepingCopies(Optimizer):
    """SGD that keeps something beside each parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(self.begin(parameter.detach()), k=0)
            state["k"] += 1
            self.update(parameter, state)

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        raise AssertionError

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        raise AssertionError


class ScheduleFreeSGD(KeepingCopies):
    """The parameters are the mean of the states z (Defazio et al., 2405.15682, with beta 1)."""

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"z": parameter.clone()}

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["z"].sub_(parameter.grad, alpha=0.1)
        parameter.lerp_(state["z"], 1 / state["k"])


class Lookahead(KeepingCopies):
    """Every second step goes half of the way back to the slow weights (Zhang et al., 1907.08610)."""

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"slow": parameter.clone()}

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        if state["k"] % 2 == 0:
            parameter.copy_(state["slow"].lerp_(parameter, 0.5))


class Masters(KeepingCopies):
    """Trains bf16 parameters in fp32."""

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"master": parameter.float()}

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        parameter.copy_(state["master"].sub_(parameter.grad.float(), alpha=0.01))


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
    with DiLoCo(module, optimizer, 2, outer=PLAIN, wire=Wire(delay_updates=delay)) as diloco:
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


def forget_the_block(runtime: Runtime, how: str) -> list[str]:
    lines = logged()
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
    return lines


@pytest.mark.parametrize(("how", "is_said"), [("", True), ("counted by hand", False), ("with a block first", False)])
def test_a_forgotten_block_is_said(how: str, is_said: bool) -> None:
    for lines in on_ranks(forget_the_block, 2, how):
        said = [line for line in lines if line.startswith("the optimizer steps outside of a block of DiLoCo: nothing")]
        assert len(said) == is_said, lines


def evaluate_and_raise(runtime: Runtime, wire: Wire) -> bool:
    module = Normed()
    optimizers = adamw(module)
    with DiLoCo(module, optimizers, 4, wire=wire) as diloco:
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
    assert on_ranks(evaluate_and_raise, 2, Wire(delay_updates=delay)) == [True] * 2
