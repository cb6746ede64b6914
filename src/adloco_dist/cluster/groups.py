"""From rank sets to process groups."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from adloco_dist.config import Backend


class Groups:
    """Process groups for tensors, one per rank set, kept for as long as the run lasts.

    `form` is collective over the whole world: every rank calls it with the same rank sets in the same order, also
    for sets that it is not in. (`use_local_synchronization` would spare the others the call, but its names
    collide when a set of ranks is formed again, and it hangs.)
    """

    def __init__(self, backend: Backend, timeout_seconds: float) -> None:
        self._backend = backend.name
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def form(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Make the groups that do not exist yet. A single rank needs none."""
        for ranks in rank_sets:
            if len(ranks) > 1 and ranks not in self._groups:
                group = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend)
                # Ranks outside get a number instead of a group.
                self._groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks, for one of them; None where a rank is alone and nothing needs to travel."""
        return self._groups[ranks] if len(ranks) > 1 else None
