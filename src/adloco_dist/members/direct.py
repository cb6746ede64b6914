"""Groups of gloo over a store of one's own, without a default process group beneath them."""

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from adloco_dist.averaging.group import Group

ABORT_TAG = 0x7FFF_0000
"""Nobody sends anything with it."""


def connected(
    store: Store,
    rank: int,
    size: int,
    host: str,
    device: torch.device,
    timeout_seconds: float,
    patience: timedelta,
) -> Group:
    """The group of all who call this with the same store. Collective.

    Args:
        store: nobody has used it before.
        rank: this member's number, of `size`.
        host: the address of this machine that the others reach.
        device: where tensors are.
        timeout_seconds: of one collective.
        patience: how long ranks wait for each other here.

    Raises:
        RuntimeError: the others have not come in time.
    """
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  (not in the stub)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = patience
    gloo = dist.ProcessGroupGloo(store, rank, size, options)
    gloo._set_default_timeout(timedelta(seconds=2 * timeout_seconds))  # a wait ends first
    made = dist.ProcessGroup(store, rank, size)
    for kind in {"cpu", device.type}:
        made._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, gloo)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    distributed_c10d._world.pg_group_ranks[made] = {number: number for number in range(size)}
    group = Group(tuple(range(size)), made, device, timeout_seconds, patience.total_seconds())
    group.connect()
    return group


def abort(group: Group) -> None:
    """Close all connections of such a group, whoever waits for them in whatever thread: gloo does so when a receive is
    late, as these are (docs/lab-notes.md)."""
    for peer in range(len(group.ranks)):
        with suppress(RuntimeError, AttributeError):  # late, as it should be; or closed before
            if peer != group.index:
                group.process_group.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))
