"""Sketches of the gradients of models that fully_shard distributes (for `NoiseScale`)."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from adloco_dist.noise.gradients import remove, sketch_dtype
from adloco_dist.noise.sketch import BUCKETS, Sketch


def sharded_probe(model: nn.Module, trained: Mapping[str, nn.Parameter], rank: int) -> "ShardedGradients":
    """The probe of a model whose trained parameters, by name, are all sharded.

    Raises:
        ValueError: they are sharded in a way that is not supported; one line.
    """
    kind = type(model).__name__
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"model={kind}: {next(iter(trained))} is a DTensor; of these only fully_shard's are supported")
    for name, parameter in trained.items():
        assert isinstance(parameter, DTensor)
        if sum(placement.is_shard() for placement in parameter.placements) > 1:
            rule = f"{name} is sharded over several mesh dimensions; only fully_shard by itself is supported"
            raise ValueError(f"model={kind}: {rule}")
    return ShardedGradients(list(trained.values()), rank)


class ShardedGradients:
    """Sees this rank's shards of the gradient that fully_shard has averaged over the ranks.

    What a backward pass adds is the difference of the accumulated gradient's sketches. Every rank signs its shards by
    itself, so that the sum of all ranks' sketches is a sketch of the whole gradient.
    """

    is_summed_over_ranks = True

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        self.device, self.dtype = torch.device(_mesh(parameters[0]).device_type), sketch_dtype(parameters)
        shard = _shard(parameters[0])  # on the CPU where fully_shard offloads
        num_elements = sum(_shard(parameter).numel() for parameter in parameters)
        self._sketch = Sketch(num_elements, self.dtype, shard.device)
        self._total = torch.zeros(BUCKETS, dtype=self.dtype, device=shard.device)
        self._has_gradient = False
        self._handles: list[RemovableHandle] = []

    def start(self, *key: int) -> None:
        self._sketch.renew(*key, self._rank)
        self._total, self._has_gradient = torch.zeros_like(self._total), False

        def note(_: torch.Tensor) -> None:
            self._has_gradient = True

        self._handles += [parameter.register_post_accumulate_grad_hook(note) for parameter in self._parameters]

    def take(self) -> torch.Tensor | None:
        if not self._has_gradient:
            return None
        self._has_gradient = False
        total, first_element = torch.zeros_like(self._total), 0
        for parameter in self._parameters:
            if parameter.grad is not None and _is_first_replica(parameter):
                total += self._sketch(_shard(parameter.grad).to(total).reshape(-1), first_element)
            first_element += _shard(parameter).numel()
        taken, self._total = total - self._total, total
        return taken.to(self.device)

    def stop(self) -> None:
        remove(self._handles)


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _mesh(tensor: torch.Tensor) -> DeviceMesh:
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh


def _is_first_replica(tensor: torch.Tensor) -> bool:
    """Whether this rank's shard counts where several ranks hold the same one."""
    assert isinstance(tensor, DTensor)
    coordinate = tensor.device_mesh.get_coordinate() or []
    return all(
        placement.is_shard() or index == 0 for placement, index in zip(tensor.placements, coordinate, strict=True)
    )
