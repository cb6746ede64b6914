"""Copies of parameters that optimizers keep in their state, which an outer step has to reach like the parameters."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from adloco_dist.averaging.shards import local

log = logging.getLogger("adloco_dist.diloco")

MAX_DISTANCE = 0.1
"""Relative distance from the parameters, after the first update, up to which a state of their shapes is a copy."""


class ParameterCopies:
    """Moves the copies of parameters in optimizers' states along with the parameters.

    Schedule-free optimizers, Lookahead and optimizers that train bf16 parameters in fp32 keep such copies, and would
    pull the parameters back to them: what an outer step adds to a parameter it has to add to its copies, too. What a
    copy differs by from its parameter stays a worker's own, like the moments of AdamW.

    Attributes:
        names: names of the states that are copies; None until they have been looked for.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.names: list[str] | None = None

    def find(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Look for copies, which show after the first update: they are still close to the parameters."""
        distances: dict[str, list[torch.Tensor]] = {}
        for parameter in parameters.values():
            own = local(parameter)
            gradient = None if parameter.grad is None else local(parameter.grad)
            for optimizer in self._optimizers:
                for name, state in _tensors(optimizer, parameter):
                    # A first moment is close to the gradient, and may be so to the parameter where that is its own
                    # gradient, as in weight decay.
                    near = [_square(state - own), *([] if gradient is None else [_square(state - gradient)])]
                    squares = torch.stack([near[0], _square(own), near[-1]]).cpu()
                    distances.setdefault(name, []).append(squares)
        self.names = []
        for name, squares in distances.items():
            distance, size, from_gradient = torch.stack(squares).sum(0).tolist()
            if size > 0 and distance < MAX_DISTANCE**2 * size and distance <= from_gradient:
                self.names.append(name)
        if self.names:
            shown = ", ".join(sorted(self.names))
            log.warning("the optimizer keeps copies of the parameters (%s): outer steps move them, too", shown)

    def move(self, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Move a parameter's copies by what the parameter is about to move.

        Args:
            target: the parameter's next values, or this rank's part of them, in any floating-point type.
        """
        for optimizer in self._optimizers if self.names else ():
            for name, state in _tensors(optimizer, parameter):
                if name in (self.names or ()):
                    state.add_((target.to(state.dtype) - local(parameter).to(state.dtype)).to(state.device))


def _tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[tuple[str, torch.Tensor]]:
    """The states of a parameter that have its shape, or this rank's parts of them."""
    found = optimizer.state.get(parameter, {}).items()
    return [
        (name, local(state))
        for name, state in found
        if isinstance(state, torch.Tensor) and state.shape == parameter.shape and state.is_floating_point()
    ]


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor.float()).square()
