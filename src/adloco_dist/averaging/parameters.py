"""The parameters of anybody's module that its optimizers train."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from adloco_dist.averaging.checks import checksum
from adloco_dist.averaging.copies import ParameterCopies
from adloco_dist.averaging.fragments import Fragment, fragments_of
from adloco_dist.averaging.outer import chunk_elements, pseudo_gradient, rejoin, restart
from adloco_dist.averaging.shards import Shards, is_sharded, local, sharded_modules
from adloco_dist.averaging.wrappers import unwrapped
from adloco_dist.vectors import VectorLayout, embeddings_of, shape_in_words

FSDP1 = "FullyShardedDataParallel has changed its parameters; use fully_shard, DistributedDataParallel or no wrapper"
FINAL = "construct DiLoCo when model and optimizers are final"


class TrainedParameters:
    """The parameters that a module's optimizers hold and train; tied ones once. All others count as frozen.

    Of sharded parameters it is this rank's parts that are meant everywhere.

    Attributes:
        layout: where flat vectors hold them.
        embeddings: indices of embeddings among them.
        copies: the optimizers' copies of them.
        dtype: type of flat vectors: fp64 if one of the parameters is of that type, else fp32.
        device: device of flat vectors: the first parameter's.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """
        Raises:
            ValueError: these parameters cannot be averaged; one line.
        """
        self._module, self._optimizers = module, optimizers
        self.copies = ParameterCopies(optimizers)
        self._sharded_modules = sharded_modules(module)
        named, held = self._named(), self._held()
        if any(type(inner).__name__ == "FullyShardedDataParallel" for inner in module.modules()):
            raise ValueError(f"model: {FSDP1}")
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
        self._in_order = list(self._trained.values())
        self._kinds = {name: _kind(parameter) for name, parameter in self._trained.items()}
        self.layout = VectorLayout.of((name, local(parameter)) for name, parameter in self._trained.items())
        types = {parameter.dtype for parameter in self._trained.values()}
        self.embeddings = embeddings_of(module, list(self._trained.values()))
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self.device = next(iter(self._trained.values())).device

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
        """Make sure that the optimizers still train the very parameters that they trained at construction.

        Raises:
            ValueError: they do not; one line.
        """
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
            if (present := _kind(parameter)) != (before := self._kinds[name]):
                was, is_now = ("{} {} on {}".format(list(shape), *more) for shape, *more in (before, present))
                raise ValueError(f"model: its parameter {name} was {was}, and is {is_now}; {FINAL}")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad and id(parameter) in held:
                raise ValueError(f"model: its parameter {name} was not trained before, and is now; {FINAL}")

    def vector(self) -> torch.Tensor:
        """The parameters as a new flat vector."""
        vector = torch.zeros(self.layout.num_elements, dtype=self.dtype, device=self.device)
        for parameter, view in self._with_views(vector):
            view.copy_(parameter)
        return vector

    def checksums(self) -> torch.Tensor:
        """A checksum of the parameters, and one of the optimizers' states of them, (2,), int64, on the CPU."""
        weights, states = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        for parameter in self._trained.values():
            weights.update(repr(checksum(local(parameter))).encode())
            for optimizer in self._optimizers:
                for name, state in sorted(optimizer.state.get(parameter, {}).items()):
                    said = checksum(local(state)) if isinstance(state, torch.Tensor) else state
                    states.update(repr((name, said)).encode())
        return torch.tensor([int.from_bytes(each.digest(), signed=True) for each in (weights, states)])

    def equal(self, anchor: torch.Tensor) -> bool:
        """Whether the parameters are what a restart from the anchor would make them."""
        return all(torch.equal(parameter, view.to(parameter)) for parameter, view in self._with_views(anchor))

    def subtract_from(
        self, anchor: torch.Tensor, packed: torch.Tensor, which: Sequence[int] | None = None
    ) -> torch.Tensor:  # fmt: skip
        """Fill `packed` with the pseudo-gradient, x - w, and its gaps with zeros.

        Args:
            packed: what a flat vector holds for the parameters of the indices in `which`, or for all; may be longer.

        Returns:
            The sum of its elements, (): finite where the parameters are.
        """
        sums, start = [], 0
        for where, indices in self.parts(which):
            total = packed[start : start + where.stop - where.start]
            for gap in self.layout.gaps(total, indices):
                gap.zero_()
            for index, (parameter, view) in zip(indices, self._with_views(anchor, indices), strict=True):
                pseudo_gradient(view, [parameter], self.layout.view(total, index, where.start))
            sums.append(total.sum())
            start += len(total)
        return torch.stack(sums).sum()

    def fragments(self, count: int) -> list[Fragment]:
        """Divide them into fragments, the same on all ranks that hold parts of one model; see `fragments_of`."""
        return fragments_of(self.layout, count, VectorLayout.of(self._trained.items()))

    def shards(self, averaged_with: Sequence[int], timeout_seconds: float) -> Shards:
        """The ranks that hold these parameters together; see `Shards`."""
        return Shards(self._trained, averaged_with, timeout_seconds)

    def put(self, vector: torch.Tensor) -> None:
        """Give the parameters the vector's values, in the memory that they have; copies of them stay as they are."""
        self._reshard()
        for parameter, view in self._with_views(vector):
            restart([parameter], view)

    def restart(self, anchor: torch.Tensor, which: Sequence[int] | None = None) -> None:
        """Bring the parameters of these indices, or all, to the anchor, and the optimizers' copies of them along."""
        self._reshard()
        for index, view in self._views(anchor, which):
            parameter = self._in_order[index]
            self.copies.move(parameter, view)
            restart([local(parameter)], view)

    def copy_to(self, packed: torch.Tensor, which: Sequence[int]) -> None:
        """Fill `packed` with the parameters of these indices."""
        for _, parameter, part in self._packed(packed, which):
            part.copy_(parameter)

    def rejoin(self, anchor: torch.Tensor, departed: torch.Tensor, which: Sequence[int]) -> None:
        """Bring the anchor's step to the parameters of these indices, which keep what they have learned since.

        Args:
            departed: what `copy_to` filled when they were sent off; used as scratch.
        """
        self._reshard()
        for index, parameter, part in self._packed(departed, which):
            view = self.layout.view(anchor, index)
            if self.copies.names:
                self.copies.move(self._in_order[index], parameter + (view - part).to(parameter))
            rejoin(parameter, part, view)

    def parts(self, which: Sequence[int] | None = None) -> Iterator[tuple[slice, Sequence[int]]]:
        """Runs of parameters that stay in a cache together: where they lie in flat vectors, and their indices."""
        return self.layout.parts(chunk_elements(self.device), which)

    def find_copies(self) -> None:
        """Look for copies of the parameters in the optimizers' states, after the first update."""
        self.copies.find(self._trained)

    def reset_optimizers(self) -> None:
        """Forget the optimizers' state of these parameters, as if no step had been taken."""
        for optimizer in self._optimizers:
            for parameter in self._trained.values():
                optimizer.state.pop(parameter, None)

    def _named(self) -> dict[str, nn.Parameter]:
        """The module's parameters, by the names that they have where no module inside of it is compiled."""
        self._reshard()
        return {name.replace("_orig_mod.", ""): p for name, p in unwrapped(self._module).named_parameters()}

    def _reshard(self) -> None:
        """Give up whole parameters that fully_shard has gathered: after a forward pass alone the root keeps its
        own, and would go on with them when parts are changed."""
        for module in self._sharded_modules:
            module.reshard()

    def _held(self) -> set[int]:
        """The identities of the parameters that the optimizers hold now."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def _views(self, vector: torch.Tensor, which: Sequence[int] | None) -> Iterator[tuple[int, torch.Tensor]]:
        """These indices, or all, each with what a flat vector holds for its parameter."""
        for index in range(len(self._in_order)) if which is None else which:
            yield index, self.layout.view(vector, index)

    def _with_views(
        self, vector: torch.Tensor, which: Sequence[int] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        """The parameters of these indices, or all, detached, each with what a flat vector holds for it."""
        for index, view in self._views(vector, which):
            yield local(self._in_order[index]), view

    def _packed(
        self, packed: torch.Tensor, which: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:  # fmt: skip
        """Indices, their parameters, detached, and their places in `packed`, one after the other without gaps."""
        start = 0
        for index in which:
            parameter = local(self._in_order[index])
            part = packed[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            yield index, parameter, part


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


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
