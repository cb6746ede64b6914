"""A module on which model instances take turns.

Weights of an instance are one flat vector; the module's trained parameters are views into the vector it was last
pointed at. Gradients and activations therefore exist once per module, whatever the number of instances, and everything
that treats parameters alike (optimizers, clipping, averaging, checksums) sees one tensor instead of hundreds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from adloco_dist.averaging.fragments import Fragment, fragments_of
from adloco_dist.averaging.shards import Shards
from adloco_dist.buffers import Buffer, Watched, persistent_buffers
from adloco_dist.config import Precision
from adloco_dist.noise.sketch import Sketch
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.vectors import VectorLayout, is_sharded, local


def vector_dtype(precision: Precision) -> torch.dtype:
    """The type of flat vectors' elements: with bf16, passes compute in bf16 and weights stay in fp32."""
    return torch.float64 if precision is Precision.fp64 else torch.float32


def computes_in_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether passes on this device run under bf16 autocast."""
    return precision is Precision.bf16 or (precision is Precision.auto and has_bf16(device))


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16 (Ampere and later, MI200 and later) rather than emulates it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def converted(module: nn.Module, device: torch.device, precision: Precision) -> nn.Module:
    """The module itself, on the device, with floating-point tensors in the type of flat vectors."""
    module.to(device)
    return module.double() if precision is Precision.fp64 else module.float()


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which forward passes are computed."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bf16(precision, device))


class FlatModel:
    """A module whose trained parameters and gradients are views into flat vectors of `num_elements` elements.

    Parameters with two or more dimensions come first: `weights[:decay_boundary]` is what weight decay applies to.
    Behind the parameters, `weights[buffer_boundary:]` holds the values of the buffers that training changes; the
    gradient is zero there, so no inner optimizer touches them. They are copied into the module when it is pointed at a
    vector, and back by `store_buffers`: a pass without that leaves no trace in the vector. Gaps between aligned
    parameters stay zero. Frozen parameters (without requires_grad) and all other buffers are in no vector.

    If several ranks hold the module's parameters together (pool/sharding.py), vectors have this rank's parts.

    Attributes:
        shards: the ranks that hold the module together; this one alone where it is whole.
        parameter_layout: where flat vectors hold the trained parameters, or this rank's parts of them.
        whole_layout: where vectors of the whole module would; the same where it is whole.
        hidden_matrices: the parameters that Muon updates as matrices, by name.
        matrix_share: their share of the trained parameters' elements.
        changing: names of the buffers that training changes.
        sketch: sketches vectors of the whole module.
        num_parameters: trained and frozen.
        payload: what travels of an averaged vector: num_elements + 1 elements, of which the last is a count.
        gradient: `payload` without that count. Free outside the inner phase: the outer step keeps the
            pseudo-gradient in it, an evaluation the weights that are to be evaluated.
        weights: the vector that the module points at.
        capacity: sequences that the device takes in one micro-batch, which decides no batch; None: any number.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        precision: Precision,
        changing: Sequence[str] = (),
        timeout_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            changing: names of the module's buffers that training changes (`changing_buffers` finds them).
            timeout_seconds: of a collective of the ranks that hold the module together.
        """
        self.dtype = vector_dtype(precision)
        self.device = device
        self.capacity: int | None = None
        is_divided = any(map(is_sharded, module.parameters()))
        self.module = (module if is_divided else converted(module, device, precision)).train()
        self.changing = tuple(changing)
        self._precision = precision
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        trained.sort(key=lambda item: item[1].ndim < 2)  # stable: order is kept
        self.shards = Shards(dict(trained), (), timeout_seconds)
        self._parameters = [parameter for _, parameter in trained]
        self.whole_layout = VectorLayout.of(trained)
        self.parameter_layout = VectorLayout.of((name, local(parameter)) for name, parameter in trained)
        count = ParameterCount.of(module)
        self.hidden_matrices, self.matrix_share, self.num_parameters = count.hidden, count.matrix_share, count.total
        self.decay_boundary = self.parameter_layout.boundary(sum(p.ndim >= 2 for p in self._parameters))
        self.buffer_boundary = self.parameter_layout.num_elements
        buffers = persistent_buffers(module)
        self._buffers: list[tuple[Buffer, torch.Tensor]] = [
            (buffer, tensor) for buffer in buffers if buffer.name in changing and (tensor := buffer.tensor) is not None
        ]
        self._buffer_layout = VectorLayout.of((buffer.name, tensor) for buffer, tensor in self._buffers)
        self._constants = Watched([buffer for buffer in buffers if buffer.name not in changing])
        self.num_elements = self.buffer_boundary + self._buffer_layout.num_elements
        self.sketch = Sketch(self.whole_layout.num_elements + self.num_buffer_elements, self.dtype, device)
        self.payload = torch.zeros(self.num_elements + 1, dtype=self.dtype, device=device)
        self.gradient = self.payload[:-1]
        self.weights = self.gradient  # until it is pointed at something
        self._set_gradients()

    @property
    def num_buffer_elements(self) -> int:
        """Of a flat vector, behind the parameters."""
        return self.num_elements - self.buffer_boundary

    def fragments(self, count: int) -> list[Fragment]:
        """The parts of the model that are averaged at different times, the same tensors on all ranks."""
        return fragments_of(self.parameter_layout, count, self.whole_layout)

    def initial_weights(self) -> torch.Tensor:
        """Copy the module's parameters and changing buffers into a new flat vector, and point the module at it."""
        weights = torch.zeros(self.num_elements, dtype=self.dtype, device=self.device)
        for parameter, view in self._parameter_views(weights):
            view.copy_(local(parameter))
        for _, tensor, view in self._buffer_views(weights):
            view.copy_(tensor)
        self.point_at(weights)
        return weights

    def point_at(self, weights: torch.Tensor) -> None:
        """Make `weights` the module's parameters, without a copy, and the values of its changing buffers."""
        self._set_parameters(weights)
        self.weights = weights
        self.load_buffers()

    def load_buffers(self) -> None:
        """Give the module's changing buffers the values in `weights`, also before a pass is repeated.

        Averages of whole numbers are rounded. The module gets the same tensors each time, whatever it has put in their
        place itself.
        """
        for buffer, tensor, value in self._buffer_views(self.weights):
            buffer.put(tensor.copy_(value if tensor.is_floating_point() else value.round()))

    def store_buffers(self) -> None:
        """Store the values of the module's changing buffers in `weights`, after an update; raises a RuntimeError where
        a buffer has another shape, or one was changed that had not changed when the module was tried."""
        for buffer, tensor, view in self._buffer_views(self.weights):
            present = buffer.tensor
            if present is None or present.shape != tensor.shape:
                raise RuntimeError(f"the module's buffer {buffer.name} has lost its shape {list(tensor.shape)}")
            view.copy_(present.detach())
        for buffer in self._constants.touched():
            rule = "was changed by an update, but not when the module was tried out; a cache is registered with"
            raise RuntimeError(f"the module's buffer {buffer.name} {rule} persistent=False")

    @contextmanager
    def borrowed(self, weights: torch.Tensor) -> Iterator[nn.Module]:
        """The module for forward passes without gradients, on `weights`; those on another device are copied over the
        gradient, which nobody uses meanwhile."""
        self.point_at(weights if weights.device == self.device else self.gradient.copy_(weights))
        self.module.eval()
        with torch.no_grad(), self.autocast():
            yield self.module
        self.module.train()

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the whole gradient, a scalar on the device."""
        return torch.linalg.vector_norm(self.gradient)

    def gradient_sketch(self) -> torch.Tensor:
        """The sketch of the gradient, (BUCKETS,)."""
        return self.sketch(self.gradient)

    @property
    def product_dtype(self) -> torch.dtype:
        """The type in which this device multiplies matrices."""
        return torch.bfloat16 if computes_in_bf16(self._precision, self.device) else self.dtype

    def autocast(self) -> torch.autocast:
        return autocast(self.device, self._precision)

    def _set_gradients(self) -> None:
        """Let backward passes add to the flat gradient."""
        for parameter, view in self._parameter_views(self.gradient):
            parameter.grad = view

    def _set_parameters(self, weights: torch.Tensor) -> None:
        for parameter, view in self._parameter_views(weights):
            parameter.data = view

    def _parameter_views(self, vector: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Every trained parameter with what a flat vector holds for it."""
        return zip(self._parameters, self.parameter_layout.views(vector).values(), strict=True)

    def _buffer_views(self, vector: torch.Tensor) -> Iterator[tuple[Buffer, torch.Tensor, torch.Tensor]]:
        """Every changing buffer with its tensor and with what a flat vector holds for it."""
        views = self._buffer_layout.views(vector[self.buffer_boundary :]).values()
        for (buffer, tensor), view in zip(self._buffers, views, strict=True):
            yield buffer, tensor, view
