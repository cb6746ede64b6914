"""Sums inside of nodes first, and then between nodes: only those cross the slow link, once for each node.

All ranks of a group that exchange slices with each other, as compressed sums do, would send as many times the bytes
over a node's link as it has ranks. Here the ranks of a node add up their payloads as they are, each the sum of one part
of it; the ranks that hold the same part on different nodes sum it in few bits; and the result travels inside of nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from adloco_dist.averaging.group import Group, ring_bytes_sent
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse


@dataclass(frozen=True)
class InsideFirst:
    """Sums payloads as they are inside of nodes, and by another averager between them, or among ranks of one node."""

    between: Quantized | Sparse
    """Sums between nodes, on some ranks of the group: it sends and receives, and takes no collective for that."""
    nodes: tuple[int, ...]
    """The node of every rank of the run."""

    @property
    def keeps_residual(self) -> bool:
        return self.between.keeps_residual

    def all_reduce(
        self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None
    ) -> torch.Tensor:
        members = self._members(group.ranks)
        mine = next(ranks for ranks in members if dist.get_rank() in ranks)
        num_parts = min(map(len, members))
        if len(members) in (1, len(group.ranks)):  # there is one node, or one rank on each
            return self.between.all_reduce(payload, num_exact, group, residual)
        values, exact = payload.split([len(payload) - num_exact, num_exact])
        pending = group.start_all_reduce(exact)
        bounds = [len(values) * number // num_parts for number in range(num_parts + 1)]
        parts = [slice(*pair) for pair in pairwise(bounds)]
        others, place = [rank for rank in mine if rank != dist.get_rank()], mine.index(dist.get_rank())
        holders = [(rank, values[part]) for rank, part in zip(mine, parts, strict=False) if rank in others]
        if place < num_parts:
            part = values[parts[place]]
            arrived = [torch.empty_like(part) for _ in others]
            group.send_and_receive(holders, list(zip(others, arrived, strict=True)))
            for other in arrived:
                part.add_(other)
            column = group.among(tuple(sorted(ranks[place] for ranks in members)))
            rest = None if residual is None else residual[parts[place]]
            part.copy_(self.between.all_reduce(part, 0, column, rest))
            group.send_and_receive([(rank, part) for rank in others], holders)
        else:
            group.send_and_receive(holders, [])
            group.send_and_receive([], holders)
        pending.wait()
        return payload

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        members = self._members(ranks)
        if len(members) in (1, len(ranks)):
            return self.between.bytes_per_rank(num_elements, num_exact, ranks)
        num_parts = min(map(len, members))
        part = -(-(num_elements - num_exact) // num_parts)
        inside = 4 * part * (num_parts - 1 + max(map(len, members)) - 1)
        column = [each[0] for each in members]
        return inside + self.between.bytes_per_rank(part, 0, column) + ring_bytes_sent(4 * num_exact, len(ranks))

    def _members(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks by node, ascending."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.nodes[rank], []).append(rank)
        return list(by_node.values())
