"""The process groups that a run's tensors travel by, one per rank set."""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from adloco_dist.averaging.group import Group, RankSet
from adloco_dist.config import Backend

NCCL_COMMUNICATORS = 8
"""Maximum number of communicators of a rank, unless the settings say otherwise."""
COMMUNICATOR_BYTES = 600_000_000
"""What a communicator of NCCL takes of the GPU's memory, roughly."""
CONNECT_SECONDS = 120.0
"""Timeout of the first collective of a group, in which NCCL connects its ranks, at most. It is half of a collective's
timeout at most: a rank that fails at once waits that long for those who try, to agree upon what is said."""
WATCHDOG_SECONDS = 60.0
"""How much later than a collective's own timeout torch's watchdog comes, which DistributedDataParallel alone needs."""

# torchrun sets the first to 1 for all ranks: a thread of torch then aborts the process when a collective is late, and
# no line says who was waited for. With 2 that thread releases what hangs, and the call that waited for it raises. The
# others end the process when that thread is busy, or delay its end by a dump.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Environment variables that are read whenever a group for NCCL is formed; to be set before the first."""


def form_group(ranks: RankSet, backend: Backend, timeout_seconds: float) -> Group | None:
    """A new group of two or more ranks; None on others. Collective over the whole world."""
    device, seconds = torch.device("cpu"), timeout_seconds
    if backend is Backend.nccl:
        device, seconds = torch.device("cuda", torch.cuda.current_device()), timeout_seconds + WATCHDOG_SECONDS
    made = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend=backend.name)
    if not isinstance(made, dist.ProcessGroup):  # ranks outside get a number
        return None
    return Group(ranks, made, device, timeout_seconds, min(CONNECT_SECONDS, timeout_seconds / 2))


def form_disjoint(rank_sets: Sequence[RankSet], backend: Backend, timeout_seconds: float) -> Group | None:
    """New groups of ranks that have none in common; the one that this rank is in. Collective over the whole world."""
    groups = [form_group(ranks, backend, timeout_seconds) for ranks in rank_sets]
    return next((group for group in groups if group is not None), None)


class Groups:
    """Groups for tensors, one per set of seats, formed when they are first asked for and kept while in use.

    A seat is a rank, or the neighbouring ranks that hold a worker's model together. Ranks that hold the same part of a
    model exchange tensors: a set of seats of S ranks each has S groups, and every rank is in one of them.

    Everything here is collective over the whole world: every rank makes the same calls in the same order, also for
    sets that it is not in. (`use_local_synchronization` would spare the others the call, but its names collide when
    a set of ranks is formed again, and it hangs.)
    """

    def __init__(
        self, backend: Backend, timeout_seconds: float, maximum: int | None = None, ranks_per_seat: int = 1
    ) -> None:
        self._backend, self._timeout_seconds = backend, timeout_seconds
        self._maximum = NCCL_COMMUNICATORS if maximum is None and backend is Backend.nccl else maximum
        """Maximum number of groups that a rank is in at one time; None: there is none."""
        self._ranks_per_seat = ranks_per_seat
        # All ranks know all sets, least recently used first, so that all release the same.
        self._groups: dict[RankSet, Group | None] = {}

    @property
    def formed(self) -> list[RankSet]:
        """The sets that have a group now, least recently used first."""
        return list(self._groups)

    def of(self, seats: RankSet) -> Group | None:
        """This rank's group of these seats, formed if need be; None on other seats, and where a seat is alone."""
        if len(seats) < 2:
            return None
        if seats in self._groups:
            group = self._groups.pop(seats)
        else:
            self._make_room(seats)
            size = self._ranks_per_seat
            columns = [tuple(size * seat + shard for seat in seats) for shard in range(size)]
            group = form_disjoint(columns, self._backend, self._timeout_seconds)
        self._groups[seats] = group
        return group

    def form_all(self, rank_sets: Sequence[RankSet]) -> None:
        """Form and connect the groups of all these sets, in the order in which they will be used; release all others.

        Raises:
            GroupError: the ranks of a group of this rank cannot exchange tensors. All groups are formed on all ranks
                by then; those after it are not connected.
        """
        self.keep(rank_sets)
        for ranks in rank_sets:
            self.of(ranks)
        for group in self._groups.values():  # now, when all ranks have come here at the same time
            if group is not None:
                group.connect()

    def crowding(self, rank_sets: Collection[RankSet]) -> str | None:
        """What to report where a rank is in more of these sets than may be formed at one time; else None."""
        needed = _most_of_a_rank(rank_sets)
        if self._maximum is None or needed <= self._maximum:
            return None
        rule = f"a rank is in {needed} groups, of which {self._maximum} may be formed at one time"
        return f"{rule}: groups form again in every round, which takes its time; use fewer trainers per rank"

    def lacking(self, rank_sets: Collection[RankSet], num_after_merges: int) -> str | None:
        """Why a rank cannot be in all its groups at one time, now or after merges; None where it can."""
        needed = max(_most_of_a_rank(rank_sets), num_after_merges)
        if self._maximum is None or needed <= self._maximum:
            return None
        rule = f"keeps averages of all trainers under way, and a rank may be in {needed} groups for that"
        return f"{rule}, of which {self._maximum} may be formed; use fewer trainers per rank"

    def bytes_to_come(self, rank: int, num_trainers: int) -> int:
        """Memory of the rank's GPU for groups that merges of a pool of so many trainers may bring; 0 with gloo.

        Every merge leaves at least one trainer fewer, and a rank is in at most one group of each trainer.
        """
        if self._backend is not Backend.nccl or self._maximum is None:
            return 0
        num_formed = sum(rank in ranks for ranks in self._groups)
        return max(0, min(self._maximum, num_trainers - 1) - num_formed) * COMMUNICATOR_BYTES

    def keep(self, rank_sets: Collection[RankSet]) -> None:
        """Release all groups but those of `rank_sets`."""
        self._release([ranks for ranks in self._groups if ranks not in rank_sets])

    def _make_room(self, ranks: RankSet) -> None:
        if self._maximum is None:
            return
        for rank in ranks:
            crowded = [other for other in self._groups if rank in other]
            self._release(crowded[: max(0, len(crowded) + 1 - self._maximum)])

    def _release(self, rank_sets: Sequence[RankSet]) -> None:
        if not rank_sets:
            return
        if self._backend is Backend.nccl:
            torch.cuda.synchronize()  # nothing of them may still be on its way
        dist.barrier()  # a rank that is done with a group must not close connections on which another still waits
        for ranks in rank_sets:
            group = self._groups.pop(ranks)
            if group is not None:
                name = group.process_group.group_name
                dist.destroy_process_group(group.process_group)
                if group.index == 0:
                    _forget(name)


def _forget(group_name: str) -> None:
    """Remove the addresses by which a group's ranks found each other from the store, where torch leaves them.

    Groups that form again in every round would fill the memory of the process that holds it.
    """
    store = _get_default_store()
    for key in store.list_keys():
        if key.startswith(f"{group_name}//"):
            store.delete_key(key)


def _most_of_a_rank(rank_sets: Collection[RankSet]) -> int:
    """The largest number of these sets that one rank is in; sets of one rank need no group, and do not count."""
    counts = Counter(rank for ranks in {ranks for ranks in rank_sets if len(ranks) > 1} for rank in ranks)
    return max(counts.values(), default=0)
