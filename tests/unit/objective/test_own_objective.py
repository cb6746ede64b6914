"""What a user's own functions must return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adloco_dist.config import SettingsError
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.losses import losses
from adloco_dist.objective.own import OwnObjective
from adloco_dist.objective.protocol import LossError
from helpers.support import own_first_batch, small_module, small_settings

CPU = torch.device("cpu")


def build() -> nn.Module:
    return small_module(small_settings())


def sum_and_count(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
    return losses(module, batch).sum(), batch.total_targets


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda loss, count: loss / count, r"returned a tensor of shape \[\]; it must return \(sum, count\)"),
        (lambda loss, count: (loss, count, 1, 1), "returned a tuple of 4; it must return"),
        (lambda loss, count: (loss, count, count + 1), "returned 25 as the third; it must be an int from 0 to 24"),
        (lambda loss, count: (loss, count, 0.5), r"returned 0\.5 as the third"),
        (lambda loss, count: (loss.expand(3), count), r"returned a tensor of shape \[3\] as the sum"),
        (lambda loss, count: (loss.item(), count), "as the sum; it must be a scalar tensor"),
        (lambda loss, count: (loss.detach(), count), "returned a sum without a gradient"),
        (lambda loss, count: (loss, 0), "returned 0 as the count; it must be an int >= 1"),
        (lambda loss, count: (loss, torch.tensor(count)), r"a tensor of shape \[\] as the count"),
        (lambda loss, count: (loss, float(count)), r"returned 24\.0 as the count"),
    ],
)
def test_a_loss_must_be_a_sum_and_a_count(change: Callable[[torch.Tensor, int], Any], detail: str) -> None:
    def loss_function(module: nn.Module, batch: TokenBatch) -> Any:
        return change(*sum_and_count(module, batch))

    objective = OwnObjective(build, loss_function, own_first_batch, seed=0)
    with pytest.raises(LossError, match=rf"^loss=.*loss_function: .*{detail}") as raised:
        objective.loss(objective.build(CPU, in_bf16=False), objective.trial_batch(2, CPU))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("built", "detail"),
    [
        (lambda: "llama", "returned a str; it must return a torch.nn.Module"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.Identity, "no parameter that requires a gradient"),
    ],
)
def test_a_model_must_be_a_module_that_can_be_trained(built: Callable[[], Any], detail: str) -> None:
    with pytest.raises(SettingsError, match=rf"^model=\S+: .*{detail}"):
        OwnObjective(built, sum_and_count, own_first_batch, seed=0).build(CPU, in_bf16=False)


def test_random_weights_follow_the_seed() -> None:
    weights = [
        OwnObjective(lambda: nn.Linear(3, 3), sum_and_count, own_first_batch, seed)
        .build(CPU, in_bf16=False)
        .get_parameter("weight")
        for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_saved_model_is_its_state_dict(tmp_path: Path) -> None:
    objective = OwnObjective(build, sum_and_count, own_first_batch, seed=0)
    module, other = objective.build(CPU, in_bf16=False), build()
    for parameter in other.parameters():
        parameter.data.zero_()
    objective.save(module, tmp_path)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_an_accuracy_is_reported_where_the_loss_counts_what_was_right() -> None:
    def with_count(module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int, int]:
        return *sum_and_count(module, batch), 3 * len(batch)

    objective = OwnObjective(build, with_count, own_first_batch, seed=0)
    module, batch = objective.build(CPU, in_bf16=False), objective.trial_batch(4, CPU)
    assert len(objective.loss(module, batch)) == 2
    with torch.no_grad():
        figures = objective.evaluate(module, batch).figures()
    assert figures["validation_accuracy"] == pytest.approx(3 / 12)


def test_only_the_loss_is_reported_of_a_loss_of_unknown_meaning() -> None:
    objective = OwnObjective(build, sum_and_count, own_first_batch, seed=0)
    module = objective.build(CPU, in_bf16=False).eval()
    with torch.no_grad():
        parts = [objective.evaluate(module, batch) for batch in objective.trial_batch(4, CPU).split(2)]
        whole = objective.evaluate(module, objective.trial_batch(4, CPU))
    assert set(whole.figures()) == {"validation_loss"}
    assert (parts[0] + parts[1]).loss == pytest.approx(whole.loss)


@pytest.mark.parametrize(
    ("blocks", "detail"),
    [
        (lambda module: module.transformer.h[0], "returned a GPT2Block; it must return a list"),
        (lambda module: [], "returned a list of 0; it must return a list of the model's layers"),
        (lambda module: [nn.Linear(2, 2)], "returned a Linear that is not in the model"),
        (
            lambda module: [module.transformer.drop],
            r"returned transformer\.drop, which has no parameters; leave it out",
        ),
        (
            lambda module: [module.transformer, module.transformer.h[0]],
            r"returned transformer\.h\.0 twice, or with a layer that",
        ),
        (lambda module: [module.lm_head, module.lm_head], "returned lm_head twice, or with a layer that it lies in"),
    ],
)
def test_blocks_that_are_none(blocks: Callable[[Any], Any], detail: str) -> None:
    objective = OwnObjective(build, sum_and_count, own_first_batch, 0, blocks)
    with pytest.raises(SettingsError, match=f"^blocks=.*: {detail}"):
        objective.blocks(objective.build(CPU, in_bf16=False))
