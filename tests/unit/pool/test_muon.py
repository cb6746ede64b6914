"""Muon: which parameters are matrices, what orthogonalising makes of them, and torch's own optimizer beside ours."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from adloco_dist.averaging.shards import Shards
from adloco_dist.config import Precision
from adloco_dist.objective.matrices import Matrices, hidden_matrices, in_words, mean_width
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.muon import STEPS, A, B, C, Muon, orthogonalized
from adloco_dist.pool.worker import Worker, peak_lr
from helpers.support import small_module, small_settings

CPU = torch.device("cpu")


def names(module: nn.Module) -> list[str]:
    return list(hidden_matrices(module, list(module.named_parameters())))


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """What the iteration does to singular values, applied to these alone."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(STEPS):
        values = A * values + B * values**3 + C * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(8, 8), (8, 12), (12, 8), (8, 40), (40, 8), (2, 30)])
def test_only_singular_values_change(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(matrices, torch.float64)
    for number, matrix in enumerate(matrices):
        torch.testing.assert_close(found[number], by_singular_values(matrix), rtol=0, atol=1e-12)
    assert ((torch.linalg.svdvals(found) > 0.5) & (torch.linalg.svdvals(found) < 1.3)).all()
    in_fp32 = orthogonalized(matrices.float(), torch.float32)
    torch.testing.assert_close(in_fp32, found.float(), rtol=0, atol=2e-3)


def test_no_gradient_moves_no_matrix() -> None:
    assert (orthogonalized(torch.zeros(2, 4, 12), torch.float32) == 0).all()


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_worker_updates_matrices_with_torch_s_muon_and_the_rest_with_its_adamw(factor: float) -> None:
    """To the bit where matrices are multiplied in bf16, as torch always does."""
    rate = 1e-2
    settings = small_settings("inner=muon", f"inner.lr={rate}", f"inner.other_lr_factor={factor}", "precision=bf16")
    flat_model = FlatModel(small_module(settings), CPU, Precision.bf16)
    worker = Worker(0, flat_model.initial_weights(), flat_model, settings.inner, settings.wire)
    module = small_module(settings)
    named = dict(module.named_parameters())
    hidden = [name for name, p in named.items() if p.ndim == 2 and "wte" not in name and "wpe" not in name]
    assert len(hidden) == 8, "four in each of two layers"
    inner = settings.inner
    muon = torch.optim.Muon(
        [named[name] for name in hidden], rate, inner.weight_decay, inner.momentum, adjust_lr_fn="match_rms_adamw"
    )
    rest = [p for name, p in named.items() if name not in hidden]
    vectors, matrices = ([p for p in rest if p.ndim == ndim] for ndim in (1, 2))
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": inner.weight_decay}]
    adamw = torch.optim.AdamW(groups, lr=rate * factor, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True)
    worker.set_learning_rate(1.0)
    for number in range(3):
        worker.attach(flat_model)
        flat_model.gradient.zero_()
        views = flat_model.parameter_layout.views(flat_model.gradient)
        for name, parameter in named.items():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            views[name].copy_(parameter.grad)
        worker.step()
        muon.step()
        adamw.step()
    for name, found in flat_model.parameter_layout.views(worker.weights).items():
        torch.testing.assert_close(found, named[name].detach(), rtol=0, atol=0, msg=name)


class Own(nn.Module):
    """A little of everything that has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.classes = nn.Embedding(5, 8)
        self.experts = nn.Parameter(torch.zeros(6, 8, 12))
        self.norm = nn.LayerNorm(8)
        self.members = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.gate = nn.Linear(8, 1)
        self.head = nn.Linear(8, 5)


def test_matrices_of_a_module_of_one_s_own() -> None:
    module = Own()
    found = hidden_matrices(module, list(module.named_parameters()))
    assert {name: matrices.stack for name, matrices in found.items()} == {
        "experts": (6, 8, 12),
        "patches.weight": (1, 8, 48),
        "members.weight": (1, 8, 8),
        "attention.in_proj_weight": (6, 4, 8),
        "attention.out_proj.weight": (1, 8, 8),
    }


def test_matrices_of_small_gpt2() -> None:
    inside = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    module = small_module(small_settings())
    assert names(module) == [f"transformer.h.{layer}.{name}.weight" for layer in range(2) for name in inside]


ARCHITECTURES = {
    "llama": (
        AutoModelForCausalLM, LlamaConfig, {"num_key_value_heads": 2},
        {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 0, "gate_proj": 0, "up_proj": 0, "down_proj": 0},
    ),
    "bert": (
        AutoModelForSequenceClassification, BertConfig, {},
        {"query": 4, "key": 4, "value": 4, "attention.output.dense": 0, "intermediate.dense": 0, "0.output.dense": 0,
         "pooler.dense": 0},
    ),
    "gpt_neox": (
        AutoModelForCausalLM, GPTNeoXConfig, {},
        {"query_key_value": 12, "attention.dense": 0, "dense_h_to_4h": 0, "dense_4h_to_h": 0},
    ),
    "bloom": (
        AutoModelForCausalLM, BloomConfig, {},
        {"query_key_value": 12, "self_attention.dense": 0, "dense_h_to_4h": 0, "dense_4h_to_h": 0},
    ),
    "gpt2": (  # its rows are what the projection reads, so that no head has matrices of its own
        AutoModelForCausalLM, GPT2Config, {}, {"c_attn": 0, "attn.c_proj": 0, "c_fc": 0, "mlp.c_proj": 0}
    ),
}  # fmt: skip
"""How to build a model, and the end of each name that Muon takes, with the heads that have matrices of their own."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_taken_of_every_architecture(architecture: str) -> None:
    """Projections, and never embeddings, heads of the model, norms or biases."""
    kind, config, own, expected = ARCHITECTURES[architecture]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 7, **own}
    module = kind.from_config(config(**sizes))
    found = hidden_matrices(module, list(module.named_parameters()))
    assert len(found) == len(expected)
    for (name, matrices), (end, heads) in zip(found.items(), expected.items(), strict=True):
        assert name.endswith(f"{end}.weight"), name
        assert matrices.is_by_head == bool(heads)
        if heads:
            assert matrices.stack == (heads, 8, 32)


def test_heads_are_as_if_each_was_a_parameter() -> None:
    weight, heads = torch.randn(12, 8), 3
    parts = [nn.Parameter(part.clone()) for part in weight.chunk(heads)]
    whole, gradient = nn.Parameter(weight.clone()), torch.randn(12, 8)
    matrices = Matrices.of((12, 8), is_convolution=False, head_rows=4)
    assert matrices
    ours = Muon(
        [{"params": [whole], "matrices": matrices, "lr": 0.1, "weight_decay": 0.0}],
        0.8, torch.bfloat16, Shards({}, (), 1.0),
    )  # fmt: skip
    ours.state[whole]["momentum_buffer"] = torch.zeros_like(whole)
    torchs = torch.optim.Muon(parts, 0.1, 0.0, 0.8, adjust_lr_fn="match_rms_adamw")
    whole.grad = gradient
    for part, rows in zip(parts, gradient.chunk(heads), strict=True):
        part.grad = rows.clone()
    ours.step()
    torchs.step()
    torch.testing.assert_close(whole.detach(), torch.cat([part.detach() for part in parts]), rtol=0, atol=0)


def test_a_model_without_matrices_has_none() -> None:
    assert names(nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))) == []


@pytest.mark.parametrize(("width", "rate"), [(128, 5e-3), (64, 1e-2), (320, 2e-3), (16, 1e-2)])
def test_the_rate_falls_with_the_width(width: int, rate: float) -> None:
    """Of Llamas, the default model first; a model is never taken for narrower than the narrowest that was looked at."""
    sizes: Any = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=4, **sizes))
    hidden = hidden_matrices(module, list(module.named_parameters()))
    assert mean_width(hidden.values()) == width, "whole projections, not a head's part"
    assert peak_lr(small_settings("inner=muon").inner, hidden) == rate
    assert peak_lr(small_settings("inner=muon", "inner.lr=1").inner, hidden) == 1


def test_the_width_of_stacks_and_of_kernels_is_that_of_one_matrix() -> None:
    sizes = {"kernels": Matrices.of((16, 4, 3, 3), is_convolution=True), "experts": Matrices.of((8, 64, 16), False)}
    assert {name: matrices.width for name, matrices in sizes.items() if matrices} == {"kernels": 16, "experts": 16}


def test_the_first_lines_of_a_run_name_what_is_updated_by_which() -> None:
    module = small_module(small_settings())
    trained = {name: parameter.shape for name, parameter in module.named_parameters()}
    line = in_words(hidden_matrices(module, list(module.named_parameters())), trained)
    assert line.startswith("muon updates 8 matrices, ")
    assert "(transformer.h.*.attn.c_attn.weight, " in line
    assert "adamw the rest (transformer.wte.weight, transformer.wpe.weight, transformer.h.*.ln_1.weight" in line
