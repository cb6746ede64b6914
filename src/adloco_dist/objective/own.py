"""A user's own model and loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from adloco_dist.config import SettingsError
from adloco_dist.data.items import ItemBatch
from adloco_dist.objective.protocol import LossError, Objective
from adloco_dist.policy.evaluation import ACCURACY, Evaluation

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class OwnObjective(Objective):
    """An objective made of a user's functions."""

    build_module: Callable[[], nn.Module]
    """Returns the module, with random numbers from torch alone, which is seeded before."""
    sum_losses: Callable[[nn.Module, Any], tuple[torch.Tensor, int] | tuple[torch.Tensor, int, int]]
    """Takes the module and what was collated; returns the loss summed over all targets, and their number."""
    first_batch: Callable[[int], ItemBatch]
    """Returns that many of the first training items, on the CPU."""
    seed: int
    """Seed of the initial weights."""
    find_blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """Returns the layers that ranks gather one by one; None: they are found."""

    def describe(self) -> str:
        return f"model={_name(self.build_module)}"

    def build(self, device: torch.device, in_bf16: bool) -> nn.Module:
        torch.manual_seed(self.seed)
        module = self.build_module()
        if not isinstance(module, nn.Module):
            raise SettingsError(f"{self.describe()}: returned {_shown(module)}; it must return a torch.nn.Module")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            rule = "the module that it returned has no parameter that requires a gradient"
            raise SettingsError(f"{self.describe()}: {rule}; leave some to be trained")
        return module.to(device)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module] | None:
        if self.find_blocks is None:
            return None
        blocks = self.find_blocks(module)
        is_list = isinstance(blocks, Sequence | nn.ModuleList) and len(blocks) > 0
        if not is_list or not all(isinstance(block, nn.Module) for block in blocks):
            raise self._blocks_error(f"returned {_shown(blocks)}; it must return a list of the model's layers")
        names = {id(member): name for name, member in module.named_modules()}
        within = [id(inner) for block in blocks for inner in block.modules()]
        for block in blocks:
            if id(block) not in names:
                raise self._blocks_error(f"returned a {type(block).__name__} that is not in the model")
            if next(block.parameters(), None) is None:
                raise self._blocks_error(f"returned {names[id(block)]}, which has no parameters; leave it out")
            if within.count(id(block)) > 1:
                raise self._blocks_error(f"returned {names[id(block)] or 'all'} twice, or with a layer that it lies in")
        return list(blocks)

    def loss(self, module: nn.Module, batch: ItemBatch) -> tuple[torch.Tensor, int]:
        loss, count, _ = self._sums(module, batch)
        return loss, count

    def _sums(self, module: nn.Module, batch: ItemBatch) -> tuple[torch.Tensor, int, int | None]:
        """The loss, the targets, and how many of them were predicted, where the function says so."""
        result = self.sum_losses(module, batch.collated)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            rule = "it must return (sum, count), the loss summed over the batch's targets and their number"
            raise self._error(f"returned {_shown(result)}; {rule}, for a mean cannot weigh batches of other counts")
        loss, count, *rest = result
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise self._error(f"returned {_shown(loss)} as the sum; it must be a scalar tensor: sum over all targets")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise self._error(f"returned {_shown(count)} as the count; it must be an int >= 1, the number of targets")
        if torch.is_grad_enabled() and not loss.requires_grad:
            rule = "compute it from the module's parameters, without detach(), item() or no_grad()"
            raise self._error(f"returned a sum without a gradient; {rule}")
        correct = rest[0] if rest else None
        if correct is not None and (type(correct) is not int or not 0 <= correct <= count):
            rule = f"it must be an int from 0 to {count}, the number of targets that were predicted"
            raise self._error(f"returned {_shown(correct)} as the third; {rule}")
        return loss, count, correct

    def trial_batch(self, num_sequences: int, device: torch.device) -> ItemBatch:
        return self.first_batch(num_sequences).to(device)

    def evaluate(self, module: nn.Module, batch: ItemBatch) -> Evaluation:
        loss, count, correct = self._sums(module, batch)
        return Evaluation(float(loss), count) if correct is None else Evaluation(float(loss), count, correct, ACCURACY)

    def save(self, module: nn.Module, directory: Path) -> None:
        """Write the state dict as safetensors: `build().load_state_dict(load_file(...))` restores the model."""
        # Views into one vector share its storage, which safetensors refuses.
        tensors = {name: tensor.detach().clone() for name, tensor in self.saved_tensors(module).items()}
        save_file(tensors, directory / WEIGHTS_FILE)

    def implementation(self, module: nn.Module) -> str:
        return f"model {_name(self.build_module)}, loss {_name(self.sum_losses)}"

    def _blocks_error(self, detail: str) -> SettingsError:
        return SettingsError(f"blocks={_name(self.find_blocks)}: {detail}")

    def _error(self, detail: str) -> LossError:
        return LossError(f"loss={_name(self.sum_losses)}: {detail}")


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _shown(value: object) -> str:
    """A value that a user's function returned, in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (int, float)):
        return repr(value)
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
