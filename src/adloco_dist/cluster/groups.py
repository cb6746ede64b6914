"""From rank sets to process groups."""

from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from adloco_dist.config import Backend

RankSet = tuple[int, ...]
"""Distinct ranks, ascending."""

NCCL_COMMUNICATORS = 8
"""Most communicators of a rank unless the settings say otherwise: each takes over half a GB of its GPU."""


class Groups:
    """Process groups for tensors, one per rank set, formed when they are first asked for and kept while in use.

    Everything here is collective over the whole world: every rank makes the same calls in the same order, also for
    sets that it is not in. (`use_local_synchronization` would spare the others the call, but its names collide when
    a set of ranks is formed again, and it hangs.)
    """

    def __init__(self, backend: Backend, timeout_seconds: float, most: int | None = None) -> None:
        """
        Args:
            most: groups that a rank may be in at one time; None: any number, 8 with NCCL.
        """
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_seconds)
        self._most = NCCL_COMMUNICATORS if most is None and backend is Backend.nccl else most
        # All ranks know all sets, least recently used first, so that all release the same.
        self._groups: dict[RankSet, dist.ProcessGroup | None] = {}

    @property
    def formed(self) -> list[RankSet]:
        """The sets that have a group now, least recently used first."""
        return list(self._groups)

    def of(self, ranks: RankSet) -> dist.ProcessGroup | None:
        """The group of these ranks, formed if need be; None on other ranks, and where a rank is alone."""
        if len(ranks) < 2:
            return None
        if ranks in self._groups:
            group = self._groups.pop(ranks)
        else:
            self._make_room(ranks)
            made = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend.name)
            group = made if isinstance(made, dist.ProcessGroup) else None  # ranks outside get a number
        self._groups[ranks] = group
        return group

    def keep(self, rank_sets: Collection[RankSet]) -> None:
        """Release all groups but those of `rank_sets`."""
        self._release([ranks for ranks in self._groups if ranks not in rank_sets])

    def _make_room(self, ranks: RankSet) -> None:
        if self._most is None:
            return
        for rank in ranks:
            crowded = [other for other in self._groups if rank in other]
            self._release(crowded[: max(0, len(crowded) + 1 - self._most)])

    def _release(self, rank_sets: Sequence[RankSet]) -> None:
        if not rank_sets:
            return
        if self._backend is Backend.nccl:
            torch.cuda.synchronize()  # nothing of them may still be on its way
        dist.barrier()  # a rank that is done with a group must not close connections on which another still waits
        for ranks in rank_sets:
            group = self._groups.pop(ranks)
            if group is not None:
                dist.destroy_process_group(group)
