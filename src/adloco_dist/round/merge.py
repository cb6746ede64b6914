"""Combining the outer state of several trainers: at a merge, and at the end of a run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.averaging.radial import exact_norms, restore_lengths
from adloco_dist.cluster.groups import Groups
from adloco_dist.policy.regrouping import Transfer
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer


def combine(
    vectors: Mapping[int, torch.Tensor], transfer: Transfer, total: torch.Tensor, group: Group | None, rank: int,
    in_bf16: bool = False,
) -> int:  # fmt: skip
    """Fill `total` with the sum of share times vector over the members of a transfer, on all its ranks.

    Every rank sums one slice. It already has that slice of the members whose workers it has; of each other member, one
    of the ranks that hold it sends that slice; and every sum is broadcast. An all-reduce, to which one rank for each
    member brings the vector and the others zeros, sends half as much again for two members on two ranks each.

    Args:
        vectors: this rank's vectors of the members, (num_elements,), by member, on any device; `total` may be one.
        total: (num_elements,); the same bits on every rank of `group` afterwards.
        rank: this one, or its seat, as `transfer` counts them.
        in_bf16: what travels is rounded to bfloat16, half the bytes of fp32; sums are taken in the vectors' own type.

    Returns:
        Bytes that this rank sent.
    """
    ranks = transfer.ranks
    bounds = [len(total) * number // len(ranks) for number in range(len(ranks) + 1)]
    slices = [slice(*pair) for pair in pairwise(bounds)]
    mine = slices[ranks.index(rank)]
    pieces = {member: vectors[member][mine] for member, holders in transfer.holders.items() if rank in holders}
    bytes_sent = 0
    if group is not None:
        outgoing = [
            [vectors[member][part].to(total.device) for member in transfer.sent(rank, receiver)]
            for receiver, part in zip(ranks, slices, strict=True)
        ]
        sizes_out = [sum(map(len, parts)) for parts in outgoing]
        sizes_in = [len(transfer.sent(sender, rank)) * (mine.stop - mine.start) for sender in ranks]
        sent = _joined([piece for parts in outgoing for piece in parts], total)
        if in_bf16:
            sent = sent.to(torch.bfloat16)
        content, size = sent.view(torch.uint8), sent.element_size()
        arrived = content.new_empty(sum(sizes_in) * size)
        group.all_to_all(arrived, content, [size * n for n in sizes_in], [size * n for n in sizes_out])
        received = arrived.view(sent.dtype).to(total.dtype)
        incoming = [member for sender in ranks for member in transfer.sent(sender, rank)]
        pieces |= zip(incoming, received.split(mine.stop - mine.start) if incoming else (), strict=True)
        bytes_sent = sent.nbytes
    _sum_into(total[mine], {member: pieces[member].to(total.device) for member in transfer.shares}, transfer.shares)
    if group is not None:
        whole = total.to(torch.bfloat16) if in_bf16 else total
        group.broadcast_each([whole[part].view(torch.uint8) for part in slices])
        bytes_sent += (len(ranks) - 1) * whole[mine].nbytes
        if in_bf16:
            total.copy_(whole)
    return bytes_sent


def _joined(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """One piece as it is; several, or none, in a tensor of their own."""
    return pieces[0] if len(pieces) == 1 else torch.cat([like[:0], *pieces])


def _sum_into(total: torch.Tensor, pieces: Mapping[int, torch.Tensor], shares: Mapping[int, float]) -> None:
    """The weighted sum, in the memory of `total`, which may be one of the pieces."""
    first = next((member for member in pieces if pieces[member].data_ptr() == total.data_ptr()), next(iter(pieces)))
    torch.mul(pieces[first], shares[first], out=total)
    for member, piece in pieces.items():
        if member != first:
            total.add_(piece, alpha=shares[member])


def merge(
    before: Mapping[int, Trainer], after: Mapping[int, Trainer], transfers: Sequence[Transfer], groups: Groups,
    flat_model: FlatModel, rank: int, in_bf16: bool = False, radial: bool = False,
) -> dict[int, int]:  # fmt: skip
    """Give every trainer that merged, or came to other ranks, its anchor and outer momentum (AdLoCo, DO_MERGE).

    Averages of anchors begin anew there: on a slow link another vector takes longer than they take to be as good again
    (docs/evidence.md).

    Collective over the whole world.

    Args:
        before: this rank's trainers as they were.
        after: its trainers as they are to be; a trainer in both is the same object.
        flat_model: its gradient is scratch.
        rank: this one, or its seat, as transfers count them.
        radial: averages of anchors are taken of directions and of norms; the anchors before are scratch then.
        in_bf16: averages over several trainers travel so; where a trainer only comes to other ranks, it stays as it
            is. Buffers may hold whole numbers, so a model that has some travels as it is, too.

    Returns:
        Bytes that this rank sent, by trainer.
    """
    bytes_sent: dict[int, int] = {}
    for transfer in transfers:
        group = groups.of(transfer.ranks)
        if rank not in transfer.ranks:
            continue
        trainer = after.get(transfer.trainer)
        mine = [trainer_id for trainer_id, holders in transfer.holders.items() if rank in holders]
        members = {trainer_id: before[trainer_id] for trainer_id in mine}
        for place in range(len((trainer or next(iter(members.values()))).outer_vectors)):
            vectors = {trainer_id: member.outer_vectors[place] for trainer_id, member in members.items()}
            result = trainer.outer_vectors[place] if trainer else flat_model.gradient
            # NCCL sends nothing that lives in CPU memory.
            total = result if result.device == flat_model.device else flat_model.gradient
            is_rounded = in_bf16 and len(transfer.shares) > 1 and flat_model.buffer_boundary == flat_model.num_elements
            lengths: list[float] = []
            if radial and place == 0 and len(transfer.shares) > 1:
                lengths = _to_directions(vectors, transfer, flat_model, group, rank)
            sent = combine(vectors, transfer, total, group, rank, is_rounded)
            restore_lengths([total[one] for one in flat_model.radial_slices] if lengths else [], lengths)
            if result is not total:
                result.copy_(total)
            bytes_sent[transfer.trainer] = bytes_sent.get(transfer.trainer, 0) + sent
        if trainer:
            trainer.begin_average()
    return bytes_sent


def _to_directions(
    anchors: Mapping[int, torch.Tensor], transfer: Transfer, flat_model: FlatModel, group: Group | None, rank: int
) -> list[float]:  # fmt: skip
    """Make the tensors of this rank's anchors unit vectors; return the weighted mean of all members' norms."""
    mean = torch.zeros(len(flat_model.radial_slices), dtype=torch.float64)
    for member, anchor in anchors.items():
        tensors = [anchor[one] for one in flat_model.radial_slices]
        norms = exact_norms(tensors)
        for tensor, norm in zip(tensors, norms, strict=True):
            tensor.mul_(1 / norm if norm else 0.0)
        if rank == min(transfer.holders[member]):
            mean += torch.tensor(norms, dtype=torch.float64) * transfer.shares[member]
    mean = mean.to(flat_model.device)
    if group is not None:
        group.all_reduce(mean)
    return mean.tolist()
