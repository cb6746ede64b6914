"""Combining the outer state of several trainers: at a merge, and at the end of a run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from adloco_dist.cluster.groups import Group, Groups
from adloco_dist.decisions.regrouping import Transfer
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer


def combine(vectors: Mapping[int, torch.Tensor], transfer: Transfer, total: torch.Tensor, group: Group | None) -> int:
    """Fill `total` with the sum of share times vector over the members of a transfer, on all its ranks.

    Every rank sums one slice. Of the members that it hosts it has the slice already; of each other member one of the
    ranks that host it sends that slice; and every sum is broadcast. An all-reduce, to which one rank for each member
    brings the vector and the others zeros, sends half as much again for two members on two ranks each.

    Args:
        vectors: by member, those that this rank holds, (num_elements,), on any device; `total` may be one of them.
        total: (num_elements,); the same bits on every rank of `group` afterwards.

    Returns:
        Bytes that this rank sent.
    """
    rank, ranks = dist.get_rank(), transfer.ranks
    bounds = [len(total) * number // len(ranks) for number in range(len(ranks) + 1)]
    slices = [slice(*pair) for pair in pairwise(bounds)]
    mine = slices[ranks.index(rank)]
    pieces = {id: vectors[id][mine] for id, holders in transfer.holders.items() if rank in holders}
    bytes_sent = 0
    if group is not None:
        outgoing = [
            [vectors[id][part].to(total.device) for id in transfer.sent(rank, receiver)]
            for receiver, part in zip(ranks, slices, strict=True)
        ]
        sizes_out = [sum(map(len, parts)) for parts in outgoing]
        sizes_in = [len(transfer.sent(sender, rank)) * (mine.stop - mine.start) for sender in ranks]
        sent = _joined([piece for parts in outgoing for piece in parts], total)
        received = total.new_empty(sum(sizes_in))
        group.all_to_all(received, sent, sizes_in, sizes_out)
        incoming = [id for sender in ranks for id in transfer.sent(sender, rank)]
        pieces |= zip(incoming, received.split(mine.stop - mine.start) if incoming else (), strict=True)
        bytes_sent = sent.nbytes
    _sum_into(total[mine], {id: pieces[id].to(total.device) for id in transfer.shares}, transfer.shares)
    if group is not None:
        group.broadcast_each([total[part] for part in slices])
        bytes_sent += (len(ranks) - 1) * total[mine].nbytes
    return bytes_sent


def _joined(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """One piece as it is; several, or none, in a tensor of their own."""
    return pieces[0] if len(pieces) == 1 else torch.cat([like[:0], *pieces])


def _sum_into(total: torch.Tensor, pieces: Mapping[int, torch.Tensor], shares: Mapping[int, float]) -> None:
    """The weighted sum, in the memory of `total`, which may be one of the pieces."""
    first = next((id for id in pieces if pieces[id].data_ptr() == total.data_ptr()), next(iter(pieces)))
    torch.mul(pieces[first], shares[first], out=total)
    for id, piece in pieces.items():
        if id != first:
            total.add_(piece, alpha=shares[id])


def merge(
    before: Mapping[int, Trainer], after: Mapping[int, Trainer], transfers: Sequence[Transfer], groups: Groups,
    flat_model: FlatModel,
) -> dict[int, int]:  # fmt: skip
    """Give every trainer that merged, or came to other ranks, its anchor and outer momentum (AdLoCo, DO_MERGE).

    Collective over the whole world.

    Args:
        before: this rank's trainers as they were.
        after: as they are to be; a trainer in both is the same object.
        flat_model: its gradient is scratch.

    Returns:
        Bytes that this rank sent, by trainer.
    """
    rank = dist.get_rank()
    bytes_sent: dict[int, int] = {}
    for transfer in transfers:
        group = groups.of(transfer.ranks)
        if rank not in transfer.ranks:
            continue
        trainer = after.get(transfer.trainer)
        members = {id: before[id] for id, holders in transfer.holders.items() if rank in holders}
        for place in range(len((trainer or next(iter(members.values()))).outer_vectors)):
            vectors = {id: member.outer_vectors[place] for id, member in members.items()}
            result = trainer.outer_vectors[place] if trainer else flat_model.gradient
            # NCCL sends nothing that lives in CPU memory.
            total = result if result.device == flat_model.device else flat_model.gradient
            sent = combine(vectors, transfer, total, group)
            if result is not total:
                result.copy_(total)
            bytes_sent[transfer.trainer] = bytes_sent.get(transfer.trainer, 0) + sent
    return bytes_sent
