"""A worker whose weights are the parameters of a user's model, in the memory that they have.

With them move the copies that optimizers keep of them, and the buffers that training changes (docs/state.md).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from adloco_dist.averaging.fragments import Fragment, Run
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.outer_sgd import add_difference, chunk_elements, rejoin
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.replica import Replica
from adloco_dist.buffers import persistent_buffers
from adloco_dist.vectors import local, shape_in_words

log = logging.getLogger("adloco_dist.diloco")

MAX_DISTANCE = 0.1
"""Relative distance from the parameters, after the first update, up to which a state of their shapes is a copy."""


class ParameterCopies:
    """Moves the copies of parameters in optimizers' states along with the parameters.

    Schedule-free optimizers, Lookahead and optimizers that train bf16 parameters in fp32 keep such copies, and would
    pull the parameters back to them. The difference of the two stays a worker's own, like the moments of AdamW.

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


class AveragedBuffers:
    """A module's persistent buffers, and copies of what they were at the last outer step.

    Those that training changes are averaged, the others are constants; the first outer step shows which is which.

    Attributes:
        values: those copies, by name.
        changing: names of the buffers that training changes; None: no outer step has been taken.
        dtype: of the vectors in which they travel: fp64 holds whole numbers up to 2^53.
    """

    dtype = torch.float64

    def __init__(self, module: nn.Module) -> None:
        """Raises a ValueError of one line where a buffer is not dense."""
        self._buffers = {buffer.name: buffer for buffer in persistent_buffers(module) if buffer.tensor is not None}
        self.values: dict[str, torch.Tensor] = {}
        for name, buffer in self._buffers.items():
            if buffer.tensor is None or buffer.tensor.layout != torch.strided or buffer.tensor.is_quantized:
                raise ValueError(f"model: its buffer {name} is not dense; if it is a cache, use persistent=False")
            self.values[name] = buffer.tensor.detach().clone(memory_format=torch.contiguous_format)
        self.changing: list[str] | None = None
        self._found: list[str] = []

    def facts(self) -> dict[str, str]:
        """What the ranks of a group must agree on, by name."""
        return {f"buffer {name}": shape_in_words(value) for name, value in self.values.items()}

    def broadcast(self, group: Group, device: torch.device, source: int) -> None:
        """Make `values` of all buffers those of one rank, to the bit. Collective."""
        if not self.values:
            return
        contents = [_content(value) for value in self.values.values()]
        everything = torch.cat([content.to(device) for content in contents])
        group.broadcast(everything, source)
        for content, received in zip(contents, everything.split(list(map(len, contents))), strict=True):
            content.copy_(received)

    def find_changing(self, group: Group | None) -> None:
        """Find which buffers training changes, on any rank; collective until an outer step has made them known.

        A ValueError of one line says that a constant has changed, or that a buffer cannot be averaged.
        """
        changed = [not torch.equal(_content(self._present(name)), _content(self.values[name])) for name in self.values]
        self._found = self.changing or []
        if self.changing is None:
            tables = [changed] if group is None or not changed else group.exchange(changed)
            self._found = [name for name, *by_rank in zip(self.values, *tables, strict=True) if any(by_rank)]
        for name, has_changed in zip(self.values, changed, strict=True):
            if has_changed and name not in self._found:
                remedy = "a cache is registered with persistent=False"
                raise ValueError(f"model: its buffer {name} has changed, but did not in the first round; {remedy}")
            if has_changed and self.values[name].is_complex():
                raise ValueError(f"model: its buffer {name} changes and is complex, which is not supported")

    @property
    def num_elements(self) -> int:
        return sum(self.values[name].numel() for name in self._found)

    def sum_of(self, replicas: Sequence[Replica], total: torch.Tensor) -> None:
        start = 0
        for name in self._found:
            value = self._present(name).reshape(-1)
            total[start : start + len(value)] = value
            start += len(value)
        total.mul_(sum(replica.weight for replica in replicas))

    def step(self, total: torch.Tensor, num_workers: float) -> None:
        """Make the mean of the workers' values those of this outer step; of whole numbers it is rounded."""
        self.changing = self._found
        if not num_workers:
            return
        values = [self.values[name] for name in self.changing]
        means = total.mul_(1 / num_workers).split([value.numel() for value in values])
        for value, mean in zip(values, means, strict=True):
            value.copy_((mean if value.is_floating_point() else mean.round()).view(value.shape))

    def restart(self, replicas: Sequence[Replica]) -> None:
        if replicas:
            self.put(self.outer_values())

    def present_values(self) -> dict[str, torch.Tensor]:
        """Copies of the changing buffers as the module has them."""
        return {name: self._present(name).clone() for name in self.changing or ()}

    def outer_values(self) -> dict[str, torch.Tensor]:
        """The changing buffers as they were at the last outer step."""
        return {name: self.values[name] for name in self.changing or ()}

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._present(name).copy_(value)

    def _present(self, name: str) -> torch.Tensor:
        present, shape = self._buffers[name].tensor, shape_in_words(self.values[name])
        if present is None or present.layout != torch.strided or shape_in_words(present) != shape:
            rule = "a buffer keeps its shape and type, unless it is registered with persistent=False"
            raise ValueError(f"model: its buffer {name} is no dense {shape} any more; {rule}")
        return present.detach()


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, (bytes,); of a contiguous one they are its own memory."""
    return tensor.reshape(-1).view(torch.uint8)


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
        self.adopt(anchor)
        self.parameters.reset_optimizers()

    def adopt(self, anchor: torch.Tensor) -> None:
        """Take the whole anchor for weights, and the buffers as they were at the last outer step."""
        self._restart(anchor, range(len(self.parameters.layout.names)))
        self.buffers.put(self.buffers.values)  # all, as it may not be known yet which of them change

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
        weights, buffers = self.parameters.vector(), self.buffers.present_values()
        try:
            self.parameters.put(anchor)
            self.buffers.put(self.buffers.outer_values())
            yield
        finally:
            self.parameters.put(weights)
            self.buffers.put(buffers)

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


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor.float()).square()
