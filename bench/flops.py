"""What the inner phase computes, and how fast a device multiplies matrices: the two sides of MFU."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from adloco_dist.cluster.devices import wait_for
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, indexed_splits
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective

VOCABULARY = 32_000
MOST_INSTANCES = 4
"""That share the random ids."""
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MATRIX_REPETITIONS = 30
MATRIX_WARMUP_SECONDS = 1.0


@dataclass(frozen=True)
class Work:
    """What all instances compute."""

    settings: Settings
    splits: TextSplits
    table: TokenTable
    """Of both splits."""
    objective: LanguageObjective
    module: nn.Module
    flops_per_token: int
    flops_in_words: str
    maximum: int
    """Largest batch that is tried."""

    @classmethod
    def of(cls, model: str, length: int, maximum: int, *overrides: str) -> "Work":
        """Random ids and a fresh model of a group of conf/, in bf16, compiled where a case asks for it."""
        settings = compose(
            [f"model={model}", "model.compile=true", "precision=bf16", f"data.sequence_length={length}",
             "algorithm=diloco", "pool.trainers=1", "pool.workers_per_trainer=1", "merge=none", "batching.request=none",
             "inner.schedule=constant", *overrides]
        )  # fmt: skip
        num_tokens = MOST_INSTANCES * maximum * length + 1
        table = TokenTable([np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, dtype=np.uint16)], length)
        splits = indexed_splits(table, table, Vocabulary(VOCABULARY), "random ids")
        objective = LanguageObjective.fitted(settings, splits.vocabulary)
        config: Any = objective.config
        module = objective.build(torch.device("cpu"), in_bf16=False)
        weights, layers, hidden = multiplied_weights(module), config.num_hidden_layers, config.hidden_size
        flops = 6 * weights + 12 * layers * hidden * length // 2
        words = (
            f"6 x {weights:,} multiplied weights + 12 x {layers} layers x {hidden} x {length} / 2 (causal attention)"
        )
        return cls(settings, splits, table, objective, module, flops, words, maximum)


def matrix_rates(device: torch.device) -> list[float]:
    """FLOP/s of single multiplications of two square bf16 matrices, once the device is warm."""
    size = MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    until = time.perf_counter() + MATRIX_WARMUP_SECONDS
    while time.perf_counter() < until:
        torch.matmul(left, right)
        wait_for(device)
    rates = []
    for _ in range(MATRIX_REPETITIONS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.matmul(left, right)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            torch.matmul(left, right)
            seconds = time.perf_counter() - begin
        rates.append(2 * size**3 / seconds)
    return rates


def multiplied_weights(module: nn.Module) -> int:
    """Elements of all matrices but those of embeddings; an output layer counts though it is tied to one."""
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Embedding)]
    return sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim > 1)
