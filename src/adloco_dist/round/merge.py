"""Combining the outer state of several trainers: at a merge, and at the end of a run."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from adloco_dist.cluster.groups import Groups
from adloco_dist.decisions.regrouping import Transfer
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.outer import ring_bytes_sent


def combine(
    contributions: Sequence[tuple[float, torch.Tensor]], total: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Fill `total` with the sum of share times vector over the contributions of all ranks of `group`.

    What has no share is not among the contributions: zero times a number that is not finite is none.

    Args:
        contributions: this rank's; vectors of the shape of `total`, on any device. One of them may be `total` itself.
        total: the same on every rank of `group` afterwards.
    """
    others = [(share, vector) for share, vector in contributions if vector is not total]
    if len(others) < len(contributions):
        total.mul_(sum(share for share, vector in contributions if vector is total))
    elif others:
        share, vector = others.pop(0)
        torch.mul(vector.to(total.device), share, out=total)
    else:
        total.zero_()
    for share, vector in others:
        total.add_(vector.to(total.device), alpha=share)
    if group is not None:
        dist.all_reduce(total, group=group)


def merge(
    before: Mapping[int, Trainer], after: Mapping[int, Trainer], transfers: Sequence[Transfer], groups: Groups,
    flat_model: FlatModel,
) -> dict[int, int]:  # fmt: skip
    """Give every trainer that merged, or came to other ranks, its anchor and outer momentum (AdLoCo, DO_MERGE).

    Collective over the whole world. Each member is contributed once, by one rank.

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
        members = [(share, before[id]) for id, share in transfer.shares.items() if transfer.senders[id] == rank]
        trainer = after.get(transfer.trainer)
        for place in range(len((trainer or members[0][1]).outer_vectors)):
            result = trainer.outer_vectors[place] if trainer else flat_model.gradient
            # NCCL reduces nothing that lives in CPU memory.
            total = result if result.device == flat_model.device else flat_model.gradient
            combine([(share, member.outer_vectors[place]) for share, member in members], total, group)
            if result is not total:
                result.copy_(total)
            bytes_sent[transfer.trainer] = bytes_sent.get(transfer.trainer, 0) + ring_bytes_sent(total, group)
    return bytes_sent
