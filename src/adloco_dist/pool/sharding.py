"""A module whose parameters the ranks of a worker hold together: each has a part of every one (fully_shard, FSDP2).

Whole parameters are gathered block by block while they are computed with, and gradients are averaged over the ranks
into everybody's parts. A flat model holds these parts: to averages, outer steps, merges and checkpoints they are a
model like any other, only smaller.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from adloco_dist.averaging.group import Group
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.vectors import Deal


class UnsuitableModuleError(ValueError):
    """A module that ranks cannot hold together; half a line that says why, and what to do."""


def shard_module(
    module: nn.Module, blocks: Sequence[nn.Module], group: Group, device: torch.device, in_bf16: bool
) -> None:
    """Give every rank of the group its part of each parameter, on its device; in place.

    Blocks are sharded by themselves, and so gathered one after the other; what is left belongs to the root.

    Args:
        module: whole, with the same weights on all ranks.
        blocks: modules within it; none lies in another.
        device: where this rank computes; of one type on all ranks.
        in_bf16: whether it is computed in bf16; its weights stay as they are, and gradients are averaged in fp32.

    Raises:
        UnsuitableModuleError: it cannot be divided (`check_division`).
    """
    deals = check_division(module, blocks, len(group.ranks))
    mesh = DeviceMesh.from_group(group.process_group, device.type)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if in_bf16 else MixedPrecisionPolicy()
    _save_memory_of_ties(module)
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda weight: Shard(deals[weight].dimension))


def check_division(module: nn.Module, blocks: Sequence[nn.Module], size: int) -> dict[nn.Parameter, Deal]:
    """How so many ranks share each parameter; raises an UnsuitableModuleError where they cannot share one evenly, or
    several blocks use one."""
    _check_ties(module, blocks)
    deals: dict[nn.Parameter, Deal] = {}
    for name, parameter in module.named_parameters():
        deal = Deal.of(parameter.shape, size)  # evenly: torch copies what it pads, and nothing else would see updates
        if deal is None:
            rule = f"its parameter {name} {list(parameter.shape)} has no dimension that {size} ranks can share evenly"
            raise UnsuitableModuleError(f"{rule}; change the shape, or pool.ranks_per_worker")
        deals[parameter] = deal
    return deals


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: members of one class, of its lists that lie in no other such list; raises an
    UnsuitableModuleError where there are none."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and _repeats(part)]
    inner = {id(part) for outer in lists for part in outer.modules() if part is not outer}
    blocks = [block for layers in lists if id(layers) not in inner for block in layers]
    if not blocks:
        rule = "has no list of layers (torch.nn.ModuleList or Sequential), whose members ranks would gather one by one"
        raise UnsuitableModuleError(f"{rule}; build it of one, or use pool.ranks_per_worker=1")
    return blocks


def _repeats(layers: nn.ModuleList | nn.Sequential) -> bool:
    """Whether these are several layers of a kind, with parameters, that can be called."""
    kinds = {type(layer) for layer in layers}
    is_called = not kinds & {nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
    have_parameters = all(next(layer.parameters(), None) is not None for layer in layers)
    return len(layers) > 1 and len(kinds) == 1 and is_called and have_parameters


class TiedLinear(nn.Linear):
    """A linear layer whose weight other modules use, too.

    Autograd adds up the gradients of all uses of a gathered weight. It does so in place only where nothing else refers
    to the memory of the first one, and a linear layer's is a view: the whole weight would be there once more.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, _WithOwnGradient.apply(self.weight), self.bias)


class _WithOwnGradient(torch.autograd.Function):
    """The tensor itself; its gradient gets memory of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clone()


class ShardedFlatModel(FlatModel):
    """A flat model of this rank's parts of a sharded module.

    Parameters are distributed tensors over views into vectors. Pointing makes new ones, for torch keeps what it gathers
    from with them; gradients are added to what it finds there.
    """

    def _set_gradients(self) -> None:
        """Only note the parameters' names: new parameters get their gradients with `_set_parameters`."""
        names: dict[int, list[str]] = {id(parameter): [] for parameter in self._parameters}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) in names:
                names[id(parameter)].append(name)
        self._names = list(names.values())
        self._address = 0

    def _set_parameters(self, weights: torch.Tensor) -> None:
        if weights.data_ptr() == self._address:  # a worker that is swapped keeps its vector in other memory
            return
        self._address = weights.data_ptr()
        placed = [self._parameter_views(vector) for vector in (weights, self.gradient)]
        assigned, named = [], {}
        for names, (parameter, part), (_, gradient) in zip(self._names, *placed, strict=True):
            assigned.append(nn.Parameter(_placed(parameter, part)))
            assigned[-1].grad = _placed(parameter, gradient)
            named |= dict.fromkeys(names, assigned[-1])
        nn.Module.load_state_dict(self.module, named, strict=False, assign=True)
        self._parameters = assigned

    @contextmanager
    def borrowed(self, weights: torch.Tensor) -> Iterator[nn.Module]:
        with super().borrowed(weights) as module:
            yield module
        assert isinstance(module, FSDPModule)
        module.reshard()  # a pass without gradients leaves whole parameters in the root

    def gradient_norm(self) -> torch.Tensor:
        """Collective over the ranks that hold the module together."""
        of_part = super().gradient_norm()
        return self.shards.sum(of_part.double().square()).sqrt().to(of_part.dtype)

    def gradient_sketch(self) -> torch.Tensor:
        """This rank's part of the sketch: those of all ranks add up to that of the sum of their gradients.

        fully_shard leaves the mean of what the ranks have computed. Elements are signed by their places in the whole
        module's vectors, so the sketch is that of the whole; columns get the places that rows would have.
        """
        layout, total = self.parameter_layout, torch.zeros(BUCKETS, dtype=self.dtype, device=self.device)
        for parameter, start, shape, offset in zip(
            self._parameters, layout.offsets, layout.shapes, self.whole_layout.offsets, strict=True
        ):
            assert isinstance(parameter, DTensor)
            size = shape.numel()
            place = offset + parameter.device_mesh.get_local_rank() * size
            total += self.sketch(self.gradient[start : start + size], place)
        return total * len(self.shards.ranks)


def _placed(parameter: nn.Parameter, part: torch.Tensor) -> DTensor:
    """The distributed tensor of which this rank has `part`, placed as `parameter` is."""
    assert isinstance(parameter, DTensor)
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _check_ties(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse parameters that several blocks use, or a block and the root: they are gathered at different times."""
    owners: dict[int, int] = {}
    inside = {id(part): number for number, block in enumerate(blocks) for part in block.modules()}
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            owner = inside.get(id(part), len(blocks))
            if owners.setdefault(id(parameter), owner) != owner:
                rule = f"its parameter {prefix}.{name} is used in several of its layers"
                raise UnsuitableModuleError(f"{rule}; give each its own, or use pool.ranks_per_worker=1")


def _save_memory_of_ties(module: nn.Module) -> None:
    """Make linear layers that share their weight `TiedLinear`, in place (fully_shard, too, changes classes)."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for part in module.modules():
        if type(part) is nn.Linear and uses[id(part.weight)] > 1:
            part.__class__ = TiedLinear
