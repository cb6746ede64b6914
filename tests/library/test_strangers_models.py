"""Models of others: tensors that are made of others, statistics that are not finite."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from adloco_dist import DiLoCo, Wire
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import PLAIN, Normed, adamw, batch, logged, on_ranks, update

pytestmark = pytest.mark.stranger


def made_of_two(requires_grad: bool, second: float = 1.0) -> nn.Module:
    """A module with a parameter that holds two tensors, as quantized weights do."""
    module = Normed()
    pair = TwoTensor(torch.ones(2, 3), torch.full((2, 3), second))
    module.register_parameter("pair", nn.Parameter(pair, requires_grad=requires_grad))
    return module


def start_with_pairs(runtime: Runtime, requires_grad: bool, differs: bool) -> str:
    module = made_of_two(requires_grad, 2.0 if differs and runtime.rank else 1.0)
    try:
        DiLoCo(module, adamw(module), 2)
    except ValueError as error:
        return str(error)
    return "started"


def test_a_trained_parameter_that_is_made_of_others_is_refused() -> None:
    for line in on_ranks(start_with_pairs, 2, True, False):
        assert line.startswith("model: its parameter pair is a "), line
        assert line.endswith(" made of other tensors, which is not supported; train a plain one")


def test_a_frozen_one_is_compared_by_what_it_is_made_of() -> None:
    assert on_ranks(start_with_pairs, 2, False, False) == ["started"] * 2
    for line in on_ranks(start_with_pairs, 2, False, True):
        assert line.startswith("frozen parameter pair differs between ranks: [2, 3] torch.float32 with checksum "), line


def break_statistics(runtime: Runtime, fragment: int) -> dict[str, Any]:
    """Rank 1's running mean becomes NaN shortly before the average of that fragment."""
    lines = logged()
    module = Normed()
    optimizers = adamw(module)
    with DiLoCo(module, optimizers, 4, outer=PLAIN, wire=Wire(fragments=2)) as diloco:
        for number in range(12):
            if number == 4 + (1 if fragment else 3) and runtime.rank == 1:
                module.get_buffer("norm.running_mean").fill_(math.nan)
                module.head.weight.data.fill_(math.nan)
            update(module, optimizers, batch(runtime.rank, number))
        diloco.outer_step()
    return {
        "left out": sum("is left out" in line for line in lines),
        "finite": all(bool(tensor.isfinite().all()) for name, tensor in module.state_dict().items() if name != "mask"),
        "mean": module.get_buffer("norm.running_mean").clone(),
    }


@pytest.mark.parametrize("fragment", [0, 1])
def test_statistics_that_are_not_finite_are_left_out_once(fragment: int) -> None:
    one, other = on_ranks(break_statistics, 2, fragment)
    assert (one["left out"], other["left out"]) == (0, 1)
    assert one["finite"]
    assert other["finite"]
    assert torch.equal(one["mean"], other["mean"])
