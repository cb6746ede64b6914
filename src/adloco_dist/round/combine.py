"""Weighted sums over trainers, brought to the ranks that need them: at a merge, and at the end of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.averaging.sums import slices_of
from adloco_dist.policy.layout import Layout


@dataclass(frozen=True)
class Transfer:
    """A weighted sum over trainers, which is needed on `ranks`."""

    shares: Mapping[int, float]
    """Shares of the members that contribute, by member, ascending."""
    holders: Mapping[int, tuple[int, ...]]
    """The ranks among `ranks` that hold each of them."""
    ranks: tuple[int, ...]
    """The ranks that need the result, and the lowest rank of every member that these do not hold; ascending."""

    @classmethod
    def of(cls, shares: Mapping[int, float], layout: Layout, needed: tuple[int, ...]) -> "Transfer":
        """The transfer of a weighted sum over trainers of `layout` to the ranks in `needed`; members without a share
        are left out."""
        held_by = {member: layout.ranks(member) for member in sorted(shares) if shares[member]}
        far = [ranks[0] for ranks in held_by.values() if not set(ranks) & set(needed)]
        everyone = tuple(sorted({*needed, *far}))
        holders = {member: tuple(rank for rank in ranks if rank in everyone) for member, ranks in held_by.items()}
        return cls({member: shares[member] for member in held_by}, holders, everyone)

    def sent(self, sender: int, receiver: int) -> list[int]:
        """The members whose slice `sender` sends to `receiver`, which does not hold them; holders take turns."""
        position = self.ranks.index(receiver)
        return [
            member
            for member, holders in self.holders.items()
            if receiver not in holders and holders[position % len(holders)] == sender
        ]


def combine(
    vectors: Mapping[int, torch.Tensor],
    transfer: Transfer,
    total: torch.Tensor,
    group: Group | None,
    rank: int,
    in_bf16: bool = False,
) -> int:
    """Fill `total` with the sum of share times vector over the members of a transfer, on all its ranks; return the
    bytes that this rank sent.

    Every rank sums one slice and sends the sum to all others. It has that slice of the members whose workers are here,
    and gets it of each other member from one rank that holds it. An all-reduce, to which one rank for each member
    brings the vector and the others zeros, sends half as much again for two members on two ranks each.

    Args:
        vectors: this rank's vectors of the members, (num_elements,), by member, on any device; `total` may be one.
        total: (num_elements,); the same bits on every rank of `group` afterwards.
        rank: this one, or its seat, as `transfer` counts them.
        in_bf16: what travels is rounded to bfloat16, half the bytes of fp32; sums are taken in the vectors' own type.
    """
    ranks = transfer.ranks
    slices = slices_of(len(total), len(ranks))
    rank_slice = slices[ranks.index(rank)]
    pieces = {member: vectors[member][rank_slice] for member, holders in transfer.holders.items() if rank in holders}
    bytes_sent, dtype = 0, torch.bfloat16 if in_bf16 else total.dtype
    if group is not None:
        sent = [
            (group.ranks[number], vectors[member][part].to(total.device, dtype))
            for number, part in enumerate(slices)
            for member in transfer.sent(rank, ranks[number])
        ]
        received = {
            member: (group.ranks[number], torch.empty_like(total[rank_slice], dtype=dtype))
            for number, sender in enumerate(ranks)
            for member in transfer.sent(sender, rank)
        }
        group.send_and_receive(sent, list(received.values()))
        pieces |= {member: piece.to(total.dtype) for member, (_, piece) in received.items()}
        bytes_sent = sum(piece.nbytes for _, piece in sent)
    near = {member: pieces[member].to(total.device) for member in transfer.shares}
    _sum_into(total[rank_slice], near, transfer.shares)
    if group is not None:
        whole = total.to(dtype)
        summed = whole[rank_slice]
        group.exchange_tensors([summed] * len(ranks), [whole[part] for part in slices])
        bytes_sent += (len(ranks) - 1) * summed.nbytes
        if in_bf16:
            total.copy_(whole)
    return bytes_sent


def _sum_into(total: torch.Tensor, pieces: Mapping[int, torch.Tensor], shares: Mapping[int, float]) -> None:
    """The weighted sum, in the memory of `total`, which may be one of the pieces."""
    first = next((member for member in pieces if pieces[member].data_ptr() == total.data_ptr()), next(iter(pieces)))
    torch.mul(pieces[first], shares[first], out=total)
    for member, piece in pieces.items():
        if member != first:
            total.add_(piece, alpha=shares[member])
