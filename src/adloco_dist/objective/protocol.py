"""What a run computes, as higher rooms see it: a module, and the sum of its losses over targets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from adloco_dist.data.protocols import Batch
from adloco_dist.objective.matrices import Matrices, hidden_matrices
from adloco_dist.policy.evaluation import Evaluation


@dataclass(frozen=True)
class ParameterCount:
    """Elements of a model's parameters."""

    trained: int
    frozen: int
    """Those of parameters without requires_grad, which are in no flat vector."""
    hidden: Mapping[str, Matrices] = field(default_factory=dict)
    """The trained parameters that Muon updates as matrices, by name; it keeps one moment of their elements."""

    @property
    def matrix_share(self) -> float:
        return sum(math.prod(matrices.shape) for matrices in self.hidden.values()) / max(self.trained, 1)

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    @classmethod
    def of(cls, module: nn.Module) -> "ParameterCount":
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        count = sum(parameter.numel() for _, parameter in trained)
        frozen = sum(parameter.numel() for parameter in module.parameters()) - count
        return cls(count, frozen, hidden_matrices(module, trained))


class LossError(ValueError):
    """A loss function did not return what it must; the message is one line for the user."""


class Objective(Protocol):
    """A model and its loss. Batches are those of the data set that the objective was made for. Methods with a body are
    right for a module of which nothing is known before it is built."""

    def describe(self) -> str:
        """Return the settings that name the model: an error message about it begins with them."""
        ...

    def num_parameters(self) -> ParameterCount | None:
        """Return the size of the module that `build` builds, without building it; None: it is not known before."""
        return None

    def check_shape(self) -> nn.Module | None:
        """Check without memory for the module, as far as possible, that it can be computed; raises a SettingsError
        where it cannot. Return the module on the meta device; None: its shape is not known before it is built."""
        return None

    def build(self, device: torch.device, in_bf16: bool) -> nn.Module:
        """Build the module for a device, and for bf16 autocast, with weights that are equal on all ranks; raises a
        SettingsError where there is no such model, or it cannot be computed."""
        ...

    def blocks(self, module: nn.Module) -> Sequence[nn.Module] | None:
        """Return the layers whose parameters are gathered one layer after the other by ranks that hold the module
        together, none of them inside another; None: the lists of layers of one class that the module has. Raises a
        SettingsError where the user names other modules."""
        return None

    def loss(self, module: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """Compute the loss summed over the batch's targets, a scalar, and the number of targets, which weigh the same
        however an update is cut into micro-batches; raises a LossError where the function returned something else."""
        ...

    def trial_batch(self, num_sequences: int, device: torch.device) -> Batch:
        """Return a batch to try the module with, as large in memory as any of so many sequences."""
        ...

    def evaluate(self, module: nn.Module, batch: Any) -> Evaluation:
        """Return the sums over a batch of what is reported of validation data; called without gradients."""
        ...

    def sample(self, module: nn.Module, batch: Any) -> tuple[str, str] | None:
        """How the first sequence of a batch begins, and what the module writes after that; called without gradients.
        None: it writes no text."""
        return None

    def save(self, module: nn.Module, directory: Path) -> None:
        """Write the module, whose parameters may be views into one vector, and what belongs to it."""
        ...

    def saved_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of a saved model, by name."""
        return module.state_dict()

    def save_beside_weights(self, module: nn.Module, directory: Path) -> None:
        """Write what belongs to the module beside its weights, of which each rank has a part."""

    def implementation(self, module: nn.Module) -> str:
        """Return how the module and the loss are computed on this rank, for people."""
        ...
