"""Sums inside of nodes first, and then between nodes: only those cross the slow link, once for each node.

All ranks of a group that exchange slices with each other, as compressed sums do, would send as many times the bytes
over a node's link as it has ranks. Here the ranks of a node add up their payloads as they are, each the sum of one part
of it; the ranks that hold the same part on different nodes sum it in few bits; and the result travels inside of nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from adloco_dist.averaging.averager import Commit, is_counted
from adloco_dist.averaging.group import Group, ring_bytes_sent
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.averaging.sums import slices_of


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

    def exchange(self, payload: torch.Tensor, num_exact: int, group: Group, residual: torch.Tensor | None) -> Commit:
        members, me = self._members(group.ranks), dist.get_rank()
        if len(members) in (1, len(group.ranks)):  # there is one node, or one rank on each
            return self.between.exchange(payload, num_exact, group, residual)
        neighbours, num_parts = next(ranks for ranks in members if me in ranks), min(map(len, members))
        place = neighbours.index(me)
        values, exact = payload.split([len(payload) - num_exact, num_exact])
        slices = slices_of(len(values), num_parts)
        # By the rank that sums it.
        parts = {rank: values[where] for rank, where in zip(neighbours, slices, strict=False)}
        own, given = parts.get(me), []
        if residual is not None and is_counted(exact):
            # What it owes of others' slices (it had another place once, or averaged without nodes) they take over.
            given = [(values[where], residual[where]) for number, where in enumerate(slices) if number != place]
        pending = group.start_all_reduce(exact)
        for value, owed in given:
            value.add_(owed)
        arrived = _sum_inside(group, neighbours, parts)
        pending.wait()
        if residual is not None and not is_counted(exact):  # nobody's: the sum is dropped, and what is owed stays
            return lambda: payload
        if own is not None:
            column = group.among(tuple(sorted(ranks[place] for ranks in members)))
            own_residual = None if residual is None else arrived.copy_(residual[slices[place]])
            own.copy_(self.between.exchange(own, 0, column, own_residual)())
        group.send_and_receive(
            [(rank, own) for rank in neighbours if rank != me and own is not None],
            [(rank, part) for rank, part in parts.items() if rank != me],
        )

        def commit() -> torch.Tensor:
            for _, owed in given:
                owed.zero_()
            if residual is not None and own is not None:
                residual[slices[place]].copy_(arrived)
            return payload

        return commit

    def bytes_per_rank(self, num_elements: int, num_exact: int, ranks: Sequence[int]) -> int:
        members = self._members(ranks)
        if len(members) in (1, len(ranks)):
            return self.between.bytes_per_rank(num_elements, num_exact, ranks)
        num_parts = min(map(len, members))
        part = -(-(num_elements - num_exact) // num_parts)
        inside = 4 * part * (num_parts - 1 + max(map(len, members)) - 1)
        column = [ranks_of_node[0] for ranks_of_node in members]
        return inside + self.between.bytes_per_rank(part, 0, column) + ring_bytes_sent(4 * num_exact, len(ranks))

    def _members(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks by node, ascending."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.nodes[rank], []).append(rank)
        return list(by_node.values())


def _sum_inside(group: Group, neighbours: Sequence[int], parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Let every rank of this node, `neighbours`, add up its part of their payloads; return memory as large as that.

    Of this rank's payload `parts` are by the rank that sums them.
    """
    me = dist.get_rank()
    place, own = neighbours.index(me), parts.get(me)
    arrived = torch.empty_like(own) if own is not None else torch.empty(0)
    for step in range(1, len(neighbours)):  # one after the other, so that there is room for one
        receiver, sender = neighbours[(place + step) % len(neighbours)], neighbours[place - step]
        sent = [(receiver, parts[receiver])] if receiver in parts else []
        group.send_and_receive(sent, [(sender, arrived)] if own is not None else [])
        if own is not None:
            own.add_(arrived)
    return arrived
