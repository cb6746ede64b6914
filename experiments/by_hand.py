"""A model, its optimizers and its data in a plain loop: for sides that the launcher does not have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from adloco_dist.averaging.shards import Shards
from adloco_dist.config import InnerOptimizer, InnerSettings, Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.matrices import hidden_matrices
from adloco_dist.policy.evaluation import Evaluation, subsets
from adloco_dist.pool.muon import Muon


@dataclass(frozen=True)
class Plain:
    """What is trained by hand, with a run's settings."""

    settings: Settings
    splits: TextSplits
    table: TokenTable
    """Training sequences."""
    objective: LanguageObjective
    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    @classmethod
    def of(cls, overrides: Sequence[str]) -> "Plain":
        torch.set_num_threads(1)
        settings = compose(overrides)
        splits = load_corpus(settings.data)
        assert isinstance(splits, TextSplits)
        assert isinstance(splits.table, TokenTable)
        objective = LanguageObjective.fitted(settings, splits.vocabulary)
        torch.manual_seed(settings.seed)
        module = objective.build(torch.device("cpu"), in_bf16=False)
        return cls(settings, splits, splits.table, objective, module, optimizers_of(module, settings.inner))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def update(self, sequences: Any, rate: float, replica: nn.Module | None = None) -> None:
        """Take an update with these sequences of the table, clipped; through `replica`, where that averages."""
        loss, _ = self.objective.loss(replica or self.module, self.table.batch(sequences))
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.settings.inner.clip_norm or float("inf"))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.module.zero_grad(set_to_none=False)

    def assign(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)

    def copied(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def validation_loss(self, weights: Sequence[torch.Tensor]) -> float:
        """Of these weights, on the sequences of the launcher's last evaluation."""
        own = self.copied()
        self.assign(weights)
        places = subsets(self.splits.validation.num_sequences, self.settings.evaluation).final
        parts = [np.array(places[first : first + 64]) for first in range(0, len(places), 64)]
        with torch.no_grad():
            sums = [self.objective.evaluate(self.module, self.splits.validation.batch(part)) for part in parts]
        self.assign(own)
        return sum(sums, Evaluation()).loss


def optimizers_of(module: nn.Module, inner: InnerSettings) -> list[torch.optim.Optimizer]:
    """Those of a worker, on a module's own parameters; every update sets their rate."""
    named = list(module.named_parameters())
    hidden = hidden_matrices(module, named) if inner.optimizer is InnerOptimizer.muon else {}
    rest = [parameter for name, parameter in named if name not in hidden]
    groups = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": inner.weight_decay},
              {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    betas = (inner.beta1, inner.beta2)
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)]
    if hidden:
        own = [{"params": [p], "matrices": hidden[name], "weight_decay": inner.weight_decay, "lr": 0.0}
               for name, p in named if name in hidden]  # fmt: skip
        found.append(Muon(own, inner.momentum, torch.float32, Shards({}, (), 60.0)))
        for group in own:
            (parameter,) = group["params"]
            found[-1].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return found
