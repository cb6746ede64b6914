"""A group that nobody else uses, so that no collective of the user's loop meets one of an average under way."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adloco_dist.averaging.checks import GO_ON, PeerLostError, is_of_another
from adloco_dist.averaging.group import Group, group_of, worker_in_words
from adloco_dist.text import first_line, ranks_in_words

LEFT = "left"
"""Key in the group's store: who left first, and why, in one line."""


class Connection:
    """A rank's connection with the others for averages: formed when it is needed, until the rank leaves.

    The ranks of a user's group are connected once more, with connections, order of collectives and timeout of their
    own: all ranks have to issue a group's collectives in one order, from one thread at a time, and a loop may use its
    groups at any time.

    Attributes:
        shared: the user's group, which is used only to connect; None: this rank is alone.
        group: that group; None: this rank is alone, or not connected.
        worker: this rank's, in words.
        has_returned: whether it has learned apart from the others, who are followed; a user's groups do not know.
    """

    has_returned = False

    def __init__(self, shared: Group | None, shards: Sequence[int], timeout_seconds: float, is_delayed: bool) -> None:
        """
        Args:
            shared: the user's group, which is used only to connect; None: this rank is alone.
            shards: the ranks that hold a worker's model together with this one.
            timeout_seconds: timeout of one collective, whatever that of the user's group is.
            is_delayed: whether collectives are issued by a thread while the loop goes on. NCCL wants those of all its
                groups in one order on all ranks, which the loop's and the thread's have not: then it is gloo.
        """
        self.shared, self._shards, self._timeout_seconds, self._is_delayed = shared, shards, timeout_seconds, is_delayed
        self._met = tuple(sorted({*shards, *(shared.ranks if shared else ())}))
        """The ranks that may be gone or late."""
        self.worker = worker_in_words(shared)
        self.group: Group | None = None

    def among(self, group: dist.ProcessGroup | None, device: torch.device) -> "Connection":
        """The connection with other ranks; arguments as of `group_of`, whose ValueError it raises."""
        shared = group_of(group, device, self._timeout_seconds)
        return Connection(shared, self._shards, self._timeout_seconds, self._is_delayed)

    def connect(self) -> None:
        """Form the group, unless this rank is alone or it is there. Collective.

        A RuntimeError says that another rank is late, or gone.
        """
        shared, timeout_seconds = self.shared, self._timeout_seconds
        if shared is None or self.group is not None:
            return
        # A name that no group of this store has had. torch's `new_group` counts groups for its names instead: ranks
        # that have formed different numbers of them would wait for each other for ever.
        ((number,), *_) = shared.exchange([secrets.randbits(62)])
        places = {rank: place for place, rank in enumerate(shared.ranks)}
        is_gloo = self._is_delayed and shared.device.type == "cuda"
        process_group, self._store = distributed_c10d._new_process_group_helper(
            len(places),
            shared.index,
            list(shared.ranks),
            "gloo" if is_gloo else dist.get_backend(shared.process_group),
            distributed_c10d._get_default_store(),
            distributed_c10d.GroupName(f"adloco_dist {number:x}"),
            # Where torch watches over collectives itself (NCCL), it ends the process: the wait here ends first.
            timeout=timedelta(seconds=2 * timeout_seconds),
            group_desc="adloco_dist",
        )
        assert isinstance(process_group, dist.ProcessGroup)
        distributed_c10d._world.pg_group_ranks[process_group] = places
        group = Group(shared.ranks, process_group, shared.device, timeout_seconds, timeout_seconds)
        group.connect()  # before one of the ranks may leave again
        self.group = group

    def leave(self, where: str | None, error: BaseException | None) -> None:
        """Close the group, if there is one: who waits for this rank, or will, has an error at once, and the reason.

        With NCCL the others wait for the timeout, since it does not tell them. `where` is as in "after 3 updates of
        round 2", or None where the others are gone themselves.
        """
        if self.group is None:
            return
        if where is not None:
            why = f" ({type(error).__name__}: {first_line(error)})" if error else ""
            rule = "all ranks have to take the same number of updates"
            with suppress(RuntimeError):  # the store's host is gone
                self._store.compare_set(LEFT, "", f"rank {dist.get_rank()} has left its loop {where}{why}, and {rule}")
        self.group.close()
        self.group = None

    @contextmanager
    def contact(self, step: int) -> Iterator[None]:
        """Raise a PeerLostError, and close the group, so that others find out, too, if collectives in the block fail
        because another rank is gone or late, or has left. `step` numbers the outer step, for the error's line."""
        try:
            yield
        except RuntimeError as error:
            if not self._met or not is_of_another(error):
                raise
            reason = self._who_left() if self.group else None
            late = f"is gone, or late by more than timeout_seconds={self._timeout_seconds:g} ({first_line(error)})"
            what = reason or f"another of the {ranks_in_words(self._met)} {late}"
            self.leave(None, None)
            raise PeerLostError(f"outer step {step} on rank {dist.get_rank()}: {what}; {GO_ON}") from error

    def _who_left(self) -> str | None:
        try:
            # Not `get` or `check` alone: these have no timeout, and the store's host may be gone.
            self._store.wait([LEFT], timedelta(seconds=1))
            return self._store.get(LEFT).decode()
        except RuntimeError:
            return None
