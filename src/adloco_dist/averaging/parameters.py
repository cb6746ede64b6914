"""The parameters of anybody's module that its optimizers train."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from adloco_dist.averaging.checks import checksum
from adloco_dist.averaging.fragments import fragments_of
from adloco_dist.averaging.outer_step import Division
from adloco_dist.averaging.shards import Shards
from adloco_dist.text import ranks_in_words
from adloco_dist.vectors import VectorLayout, is_sharded, local, shape_in_words, sharded_modules

FINAL = "construct DiLoCo when model and optimizers are final"


class TrainedParameters:
    """The parameters that a module's optimizers hold and train; tied ones once. All others count as frozen.

    Of sharded parameters it is this rank's parts that are meant everywhere.

    Attributes:
        tensors: the parameters.
        layout: where flat vectors hold them, in this order.
        optimizers: those that hold them.
        dtype: type of flat vectors: fp64 if one of the parameters is of that type, else fp32.
        device: device of flat vectors: the first parameter's.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises a ValueError of one line where these parameters cannot be averaged."""
        self._module, self.optimizers = module, optimizers
        self._sharded_modules = sharded_modules(module)
        named, held = self._named(), self._held()
        if any(type(inner).__name__ == "FullyShardedDataParallel" for inner in module.modules()):
            remedy = "use fully_shard, DistributedDataParallel or no wrapper"
            raise ValueError(f"model: FullyShardedDataParallel has changed its parameters; {remedy}")
        for name, parameter in named.items():
            if obstacle := _obstacle(parameter):
                raise ValueError(f"model: its parameter {name} is {obstacle}")
        if foreign := held - {id(parameter) for parameter in named.values()}:
            rule = "pass the model that the optimizer was constructed for"
            raise ValueError(f"optimizer: {len(foreign)} of its parameters are not the model's; {rule}")
        self._trained = {name: p for name, p in named.items() if id(p) in held and p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if name not in self._trained}
        if not self._trained:
            rule = "pass the optimizer of parameters that require gradients"
            raise ValueError(f"optimizer: it trains no parameter of the model; {rule}")
        self.tensors = list(self._trained.values())
        self._on_device = {name: _on_device(parameter) for name, parameter in self._trained.items()}
        self.layout = VectorLayout.of((name, local(parameter)) for name, parameter in self._trained.items())
        types = {parameter.dtype for parameter in self.tensors}
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self.device = self.tensors[0].device

    @property
    def without_optimizer(self) -> list[str]:
        """Names of the parameters that require gradients, and that no optimizer holds."""
        held = self._held()
        return [name for name, p in self._frozen.items() if p.requires_grad and id(p) not in held]

    def facts(self) -> dict[str, str]:
        """What the ranks of a group must agree on, by name."""
        order = hashlib.blake2b("\n".join(self._trained).encode(), digest_size=8).hexdigest()
        shapes = {f"parameter {name}": _placed(parameter) for name, parameter in self._trained.items()}
        frozen = {
            f"frozen parameter {name}": f"{_placed(p)} with checksum {_content_checksum(local(p)):x}"
            for name, p in self._frozen.items()
        }
        return {**shapes, **frozen, "the order of the parameters": order}

    def check(self) -> None:
        """Raise a ValueError of one line unless the optimizers still train the very parameters as at construction."""
        named, held = self._named(), self._held()
        known = {id(parameter) for parameter in (*self._trained.values(), *self._frozen.values())}
        if later := held - known:
            added = [name for name, parameter in named.items() if id(parameter) in later]
            name = added[0] if added else f"{len(later)} parameters that are not the model's"
            raise ValueError(f"optimizer: it holds {name}, which it did not at construction; {FINAL}")
        for name, parameter in self._trained.items():
            if named.get(name) is not parameter:
                raise ValueError(f"model: its parameter {name} has been replaced or removed; {FINAL}")
            if id(parameter) not in held:
                raise ValueError(f"optimizer: it does not hold the model's parameter {name} any more; {FINAL}")
            if (present := _on_device(parameter)) != (before := self._on_device[name]):
                raise ValueError(f"model: its parameter {name} was {before}, and is {present}; {FINAL}")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad and id(parameter) in held:
                raise ValueError(f"model: its parameter {name} was not trained before, and is now; {FINAL}")

    def vector(self) -> torch.Tensor:
        """The parameters as a new flat vector."""
        vector = torch.zeros(self.layout.num_elements, dtype=self.dtype, device=self.device)
        for _, parameter, view in self.with_views(vector):
            view.copy_(parameter)
        return vector

    def checksums(self) -> torch.Tensor:
        """A checksum of the parameters, and one of the optimizers' states of them, (2,), int64, on the CPU."""
        weights, states = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        for parameter in self.tensors:
            weights.update(repr(checksum(local(parameter))).encode())
            for optimizer in self.optimizers:
                for name, state in sorted(optimizer.state.get(parameter, {}).items()):
                    said = checksum(local(state)) if isinstance(state, torch.Tensor) else state
                    states.update(repr((name, said)).encode())
        return torch.tensor([int.from_bytes(content.digest(), signed=True) for content in (weights, states)])

    def equal(self, anchor: torch.Tensor) -> bool:
        """Whether the parameters are what a restart from the anchor would make them."""
        return all(torch.equal(parameter, view.to(parameter)) for _, parameter, view in self.with_views(anchor))

    def with_views(
        self, vector: torch.Tensor, which: Iterable[int] | None = None, start: int = 0
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """These indices, or all, each with its parameter, detached, and with what a flat vector, less the first `start`
        elements, holds for it."""
        for index in range(len(self.tensors)) if which is None else which:
            yield index, local(self.tensors[index]), self.layout.view(vector, index, start)

    def division(self, num_fragments: int, averaged_with: Sequence[int], timeout_seconds: float) -> Division:
        """Divide them for outer steps, alike on all ranks that hold parts of one model; arguments as of `Shards`."""
        shards = Shards(self._trained, averaged_with, timeout_seconds)
        fragments = fragments_of(self.layout, num_fragments, VectorLayout.of(self._trained.items()))
        return Division(fragments, shards, self.device)

    def put(self, vector: torch.Tensor) -> None:
        """Give the parameters the vector's values, in the memory that they have; copies of them stay as they are."""
        self.reshard()
        for _, parameter, view in self.with_views(vector):
            parameter.copy_(view)

    def reset_optimizers(self) -> None:
        """Forget the optimizers' state of these parameters, as if no step had been taken."""
        for optimizer in self.optimizers:
            for parameter in self.tensors:
                optimizer.state.pop(parameter, None)

    def _named(self) -> dict[str, nn.Parameter]:
        """The module's parameters, by the names that they have where no module inside of it is compiled."""
        self.reshard()
        return {name.replace("_orig_mod.", ""): p for name, p in unwrapped(self._module).named_parameters()}

    def reshard(self) -> None:
        """Give up whole parameters that fully_shard has gathered: after a forward pass alone the root keeps its own,
        and would go on with them when parts are changed."""
        for module in self._sharded_modules:
            module.reshard()

    def _held(self) -> set[int]:
        """The identities of the parameters that the optimizers hold now."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The module, then what DistributedDataParallel and torch.compile have wrapped, from the outside in."""
    inner: object = module
    while isinstance(inner, nn.Module):
        yield inner
        wraps = isinstance(inner, DistributedDataParallel | DataParallel)
        inner = inner.module if wraps else getattr(inner, "_orig_mod", None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel and torch.compile, which put their own names before its names."""
    return list(_wrappers(module))[-1]


def check_data_parallel(module: nn.Module, ranks: Sequence[int]) -> None:
    """Raise a ValueError of one line if the module's DistributedDataParallel makes two of these ranks one worker."""
    wrappers = [inner for inner in _wrappers(module) if isinstance(inner, DistributedDataParallel)]
    joined = sorted({rank for ddp in wrappers for rank in dist.get_process_group_ranks(ddp.process_group)} & set(ranks))
    if len(joined) > 1:
        rule = f"averages gradients over {ranks_in_words(joined)}, which makes them one worker"
        remedy = "wrap no model in it, or give group one rank of each worker"
        raise ValueError(f"model: its DistributedDataParallel {rule}; {remedy}")


def _obstacle(parameter: nn.Parameter) -> str | None:
    """What a parameter is that cannot be averaged; None where it can."""
    if is_lazy(parameter):
        return "not initialized; run a forward pass first"
    if parameter.is_meta:
        return "on the meta device; give it memory and values first"
    if parameter.layout != torch.strided:
        return "sparse, which is not supported; use a dense one"
    if parameter.is_complex():
        return "complex, which is not supported; use torch.view_as_real"
    if parameter.requires_grad and hasattr(parameter, "__tensor_flatten__") and not is_sharded(parameter):
        return f"a {type(parameter).__name__} made of other tensors, which is not supported; train a plain one"
    return None


def _placed(parameter: torch.Tensor) -> str:
    """Shape and type of this rank's part of a parameter, and how it is divided among ranks if it is."""
    placements = f" as {getattr(parameter, 'placements', '')}" if is_sharded(parameter) else ""
    return shape_in_words(local(parameter)) + placements


def _content_checksum(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bits; of one that is made of others (quantized, say), of theirs."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return checksum(tensor)[1]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(_content_checksum(getattr(tensor, name)) * place for place, name in enumerate(names, 1))


def _on_device(tensor: torch.Tensor) -> str:
    return f"{shape_in_words(tensor)} on {tensor.device}"
