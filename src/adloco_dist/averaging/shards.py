"""A worker whose model several ranks hold together: each has a part of every parameter (fully_shard, DTensors).

Parts are what is averaged, between the ranks that hold the same part of other workers' models. What concerns a whole
worker, whether its weights are finite and how long its pseudo-gradient is, its own ranks agree on.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from adloco_dist.averaging.group import Group, RankSet
from adloco_dist.text import ranks_in_words
from adloco_dist.vectors import is_sharded, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Shards:
    """The ranks that hold one worker's model together; of a model that is whole, this rank alone.

    Attributes:
        ranks: those ranks, ascending; none where it is whole.
        met: these, and all with whom this rank averages.
        index: this rank's place among `ranks`.
        place: which part of the model this rank holds, in words.
        has_copies: whether ranks of the worker have copies of some parameters, beside parts of others.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], averaged_with: Sequence[int], timeout_seconds: float
    ) -> None:
        """A ValueError of one line says that parameters are on several meshes of ranks, or ranks of one worker would
        average.

        Args:
            averaged_with: the ranks that average with each other, this one among them; none: it does so with nobody.
            timeout_seconds: of one collective.
        """
        mesh = _mesh(parameters)
        self.ranks: RankSet = tuple(sorted(mesh.mesh.flatten().tolist())) if mesh else ()
        self.met: RankSet = tuple(sorted({*self.ranks, *averaged_with}))
        if len(joined := sorted({*self.ranks} & {*averaged_with})) > 1:
            rule = f"{ranks_in_words(joined)} hold parts of one worker's model"
            remedy = "give the ranks that hold the same part of it, as a mesh of (workers, shards) groups them"
            raise ValueError(f"group: {rule}; {remedy}")
        self.index = self.ranks.index(dist.get_rank()) if mesh else 0
        self.place = f"{tuple(mesh.get_coordinate() or ())} of {tuple(mesh.shape)}" if mesh else "all of it"
        self._groups: list[Group] = []
        self._whole: list[frozenset[int]] = []  # indices of parameters, by group
        for dimension in range(mesh.ndim if mesh else 0):
            assert mesh
            group, device = mesh.get_group(dimension), _device(mesh.device_type, parameters.values())
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups.append(Group(ranks, group, device, timeout_seconds, timeout_seconds))
            self._whole.append(_whole_along(dimension, parameters.values()))
        self.has_copies = any(self._whole)

    def all_agree(self, holds: bool) -> bool:
        """Whether something holds on all ranks of the worker. Collective over them."""
        return bool(self.smallest(holds))

    def smallest(self, number: int) -> int:
        """The smallest of the numbers of the worker's ranks. Collective over them."""
        for group in self._groups:
            number = min(answer for (answer,) in group.exchange([number]))
        return number

    def total(self, count: int) -> int | torch.Tensor:
        """The sum of a whole number over the worker's ranks; of several, a scalar on their device. Collective."""
        if not self._groups:
            return count
        return self.sum(torch.tensor(count, dtype=torch.float64, device=self._groups[0].device))  # exact up to 2^53

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by the sum of those of all of the worker's ranks, and return it. Collective over them."""
        for group in self._groups:
            group.all_reduce(tensor)
        return tensor

    def exchange(self, sent: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send every rank of the worker its tensor, on a mesh of one dimension; what each of them has sent, which is
        like the tensors of `like`. Collective over them."""
        (group,) = self._groups
        received = [torch.empty_like(tensor) for tensor in like]
        received[self.index] = sent[self.index]
        group.exchange_tensors(sent, received)
        return received

    def unify(self, averages: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Give the copies of a parameter that several ranks hold whole the average of the lowest of them: a compressed
        average rounds each copy with the other parts of its rank. Collective over the worker's ranks.

        Averages come with the indices of their parameters, and may have gaps at the end.
        """
        for group, whole in zip(self._groups, self._whole, strict=True):
            copies = [average for index, average in averages if index in whole]
            if not copies:
                continue
            together = torch.cat(copies)
            group.broadcast(together)
            for copy, values in zip(copies, together.split([len(copy) for copy in copies]), strict=True):
                copy.copy_(values)


def _mesh(parameters: Mapping[str, torch.Tensor]) -> "DeviceMesh | None":
    """The mesh of the sharded ones; None where all are whole."""
    sharded = {name: cast("DTensor", parameter) for name, parameter in parameters.items() if is_sharded(parameter)}
    meshes = {name: parameter.device_mesh for name, parameter in sharded.items()}
    first = next(iter(meshes.items()), None)
    for name, mesh in meshes.items():
        if first and mesh != first[1]:
            rule = "is sharded over other ranks than"
            raise ValueError(f"model: its parameter {name} {rule} {first[0]}; shard all over one mesh")
    return first[1] if first else None


def _whole_along(dimension: int, parameters: Iterable[torch.Tensor]) -> frozenset[int]:
    """The indices of those parameters that ranks along a dimension of the mesh have copies of, while they have parts of
    others. Where they have copies of all, their averages are equal already."""
    is_whole = [
        not (is_sharded(parameter) and cast("DTensor", parameter).placements[dimension].is_shard())
        for parameter in parameters
    ]
    return frozenset(index for index, whole in enumerate(is_whole) if whole and not all(is_whole))


def _device(kind: str, parameters: Iterable[torch.Tensor]) -> torch.device:
    """Where this rank exchanges tensors of a mesh's kind of device: where its parts are, or would be.

    Parts that are kept in CPU memory (CPUOffloadPolicy) are gathered on the GPU that this thread uses.
    """
    devices = {part.device.type: part.device for part in map(local, parameters)}
    return devices.get(kind) or torch.device(kind, torch.cuda.current_device())
