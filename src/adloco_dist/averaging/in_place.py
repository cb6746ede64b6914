"""A worker whose weights are the parameters of a user's model, in the memory that they have."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from adloco_dist.averaging.buffers import AveragedBuffers
from adloco_dist.averaging.fragments import Fragment, Run
from adloco_dist.averaging.outer_sgd import add_difference, chunk_elements, rejoin
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.replica import Replica
from adloco_dist.vectors import local

log = logging.getLogger("adloco_dist.diloco")

MAX_DISTANCE = 0.1
"""Relative distance from the parameters, after the first update, up to which a state of their shapes is a copy."""


class InPlace(Replica):
    """The one worker of a rank, whose weights are the user's parameters.

    Attributes:
        parameters: those that are averaged.
        buffers: those of their module.
        copies: the optimizers' copies of the parameters.
    """

    def __init__(self, parameters: TrainedParameters, buffers: AveragedBuffers, departed: int) -> None:
        """`departed` are the elements of the largest fragment, if updates are taken while it travels; else 0."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(rank, torch.zeros(departed, dtype=parameters.dtype, device=parameters.device))
        self.parameters, self.buffers = parameters, buffers
        self.copies = ParameterCopies(parameters)

    def runs(self, fragment: Fragment) -> Iterator[Run]:
        return fragment.tensor_runs(self.parameters.layout, chunk_elements(self.parameters.device))

    def add_difference(self, anchor: torch.Tensor, total: torch.Tensor, run: Run, is_first: bool) -> None:
        layout, start = self.parameters.layout, run.where.start
        for gap in layout.gaps(total, run.tensors) if is_first else ():
            gap.zero_()
        for index, parameter, view in self.parameters.with_views(anchor, run.tensors, start):
            add_difference(view, parameter, layout.view(total, index, start), is_first, self.weight)

    def restart(self, anchor: torch.Tensor, run: Run) -> None:
        self._restart(anchor, run.tensors, run.where.start)

    def recover(self, anchor: torch.Tensor) -> None:
        rule = "is left out of an outer step, weights are not finite; it restarts with a fresh optimizer state"
        log.warning("rank %d %s", self.id, rule)
        self._restart(anchor, range(len(self.parameters.layout.names)))
        self.parameters.reset_optimizers()
        self.buffers.recover()

    def depart(self, fragment: Fragment) -> None:
        for index, part in self._departed(fragment):
            part.copy_(local(self.parameters.tensors[index]))

    def rejoin(self, anchor: torch.Tensor, fragment: Fragment) -> None:
        self.parameters.reshard()
        parts = dict(self._departed(fragment))
        for index, parameter, view in self.parameters.with_views(anchor, fragment.tensors):
            if self.copies.names:
                self.copies.move(index, parameter + (view - parts[index]).to(parameter))
            rejoin(parameter, parts[index], view)

    @contextmanager
    def outer_weights(self, anchor: torch.Tensor) -> Iterator[None]:
        """Have the anchor's weights and buffers in the model while the block runs; copies stay as they are."""
        own = self.parameters.vector()
        self.parameters.put(anchor)
        try:
            with self.buffers.outer_values():
                yield
        finally:
            self.parameters.put(own)

    def _restart(self, anchor: torch.Tensor, which: Sequence[int], start: int = 0) -> None:
        """Bring the parameters of these indices to the anchor, which lacks `start` elements at its beginning, and the
        optimizers' copies of them along."""
        self.parameters.reshard()
        for index, parameter, view in self.parameters.with_views(anchor, which, start):
            self.copies.move(index, view)
            parameter.copy_(view)

    def _departed(self, fragment: Fragment) -> Iterator[tuple[int, torch.Tensor]]:
        """Indices of tensors with their places in `departed`, one after the other without gaps."""
        start = 0
        for index in fragment.tensors:
            shape = self.parameters.layout.shapes[index]
            yield index, self.departed[start : start + shape.numel()].view(shape)
            start += shape.numel()


class ParameterCopies:
    """Moves the copies of parameters in optimizers' states along with the parameters.

    Schedule-free optimizers, Lookahead and optimizers that train bf16 parameters in fp32 keep such copies, and would
    pull the parameters back to them: what an outer step adds to a parameter it has to add to its copies, too. What a
    copy differs by from its parameter stays a worker's own, like the moments of AdamW.

    Attributes:
        names: names of the states that are copies; None until they have been looked for.
    """

    def __init__(self, parameters: TrainedParameters) -> None:
        self._parameters = parameters
        self.names: list[str] | None = None

    def find(self) -> None:
        """Look for copies, which show after the first update: they are still close to the parameters."""
        distances: dict[str, list[torch.Tensor]] = {}
        for index, parameter in enumerate(self._parameters.tensors):
            own = local(parameter)
            gradient = None if parameter.grad is None else local(parameter.grad)
            for name, state in self._states(index):
                # A first moment is close to the gradient, and may be so to the parameter where that is its own
                # gradient, as in weight decay.
                near = [_square(state - own), *([] if gradient is None else [_square(state - gradient)])]
                distances.setdefault(name, []).append(torch.stack([near[0], _square(own), near[-1]]).cpu())
        self.names = []
        for name, squares in distances.items():
            distance, size, from_gradient = torch.stack(squares).sum(0).tolist()
            if size > 0 and distance < MAX_DISTANCE**2 * size and distance <= from_gradient:
                self.names.append(name)
        if self.names:
            shown = ", ".join(sorted(self.names))
            log.warning("the optimizer keeps copies of the parameters (%s): outer steps move them, too", shown)

    def move(self, index: int, target: torch.Tensor) -> None:
        """Move the copies of a parameter, or of this rank's part, by what it is about to move: to `target`, in any
        floating-point type."""
        if not self.names:
            return
        own = local(self._parameters.tensors[index])
        for name, state in self._states(index):
            if name in self.names:
                state.add_((target.to(state.dtype) - own.to(state.dtype)).to(state.device))

    def _states(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizers' states of a parameter that have its shape, or this rank's parts of them, with their names."""
        parameter = self._parameters.tensors[index]
        for optimizer in self._parameters.optimizers:
            for name, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and state.shape == parameter.shape and state.is_floating_point():
                    yield name, local(state)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor.float()).square()
