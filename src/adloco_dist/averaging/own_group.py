"""A group that nobody else uses, so that no collective of the user's loop can meet one of an average that travels."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from adloco_dist.averaging.checks import contact
from adloco_dist.averaging.group import Group
from adloco_dist.text import first_line

LEFT = "left"
"""Key in the group's store: who left first, and why, in one line."""


class OwnGroup(Group):
    """The ranks of a user's group, connected once more: with their own connections, order of collectives and timeout.

    torch's collectives of one group have to be issued in one order on all ranks, by one thread at a time. A loop may
    use its groups at any time, so a thread that averages while the loop goes on has to have a group of its own.
    """

    def __init__(self, shared: Group, timeout_seconds: float, is_delayed: bool) -> None:
        """Connect the ranks. Collective over them.

        Args:
            shared: the user's group, which is used for this alone.
            is_delayed: whether collectives are issued by a thread while the loop goes on. NCCL wants those of all its
                groups in one order on all ranks, which the loop's and the thread's have not: then it is gloo.
            timeout_seconds: timeout of one collective, whatever that of the user's group is.

        Raises:
            RuntimeError: another rank is late, or gone.
        """
        # A name that no group of this store has had. torch's `new_group` counts groups for its names instead: ranks
        # that have formed different numbers of them would wait for each other for ever.
        ((number,), *_) = shared.exchange([secrets.randbits(62)])
        places = {rank: place for place, rank in enumerate(shared.ranks)}
        is_gloo = is_delayed and shared.device.type == "cuda"
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
        super().__init__(shared.ranks, process_group, shared.device, timeout_seconds, timeout_seconds)
        self.connect()  # before one of the ranks may leave again

    def leave(self, reason: str) -> None:
        """Close this rank's connections: who waits for it, or will, has an error at once, and finds the reason.

        With NCCL the others wait for the timeout, since it does not tell them.
        """
        with suppress(RuntimeError):  # the store's host is gone
            self._store.compare_set(LEFT, "", reason)
        self.close()

    def close(self) -> None:
        """Close this rank's connections; an average that travels keeps them until it has arrived."""
        self._last_work = None
        if distributed_c10d._world.pg_map.get(self.process_group):  # the user may have destroyed all groups
            dist.destroy_process_group(self.process_group)
        del self.process_group

    def who_left(self) -> str | None:
        """Who left first, and why; None where nobody did."""
        try:
            # Not `get` or `check` alone: these have no timeout, and the store's host may be gone.
            self._store.wait([LEFT], timedelta(seconds=1))
            return self._store.get(LEFT).decode()
        except RuntimeError:
            return None


class Connection:
    """A rank's connection with the others for averages: formed when it is needed, until the rank leaves.

    Attributes:
        group: the own group; None: this rank is alone, or not connected.
    """

    def __init__(self, shared: Group | None, met: Sequence[int], timeout_seconds: float, is_delayed: bool) -> None:
        """
        Args:
            shared: the user's group; None: this rank is alone.
            met: the ranks that may be gone or late; none: this rank is alone.
            timeout_seconds: timeout of one collective.
            is_delayed: whether averages travel while the loop goes on.
        """
        self._shared, self._met, self._timeout_seconds, self._is_delayed = shared, met, timeout_seconds, is_delayed
        self.group: OwnGroup | None = None

    def connect(self) -> None:
        """Form the own group, unless this rank is alone or it is there. Collective."""
        if self._shared is not None and self.group is None:
            self.group = OwnGroup(self._shared, self._timeout_seconds, self._is_delayed)

    def leave(self, where: str | None, error: BaseException | None) -> None:
        """Close the own group, if there is one, and let the others know that this rank has left its loop.

        Args:
            where: "after 3 updates of round 2"; None where the others are gone themselves.
            error: because of which it leaves.
        """
        if self.group is not None and where is not None:
            why = f" ({type(error).__name__}: {first_line(error)})" if error else ""
            rule = "all ranks have to take the same number of updates"
            self.group.leave(f"rank {dist.get_rank()} has left its loop {where}{why}, and {rule}")
        elif self.group is not None:
            self.group.close()
        self.group = None

    @contextmanager
    def contact(self, where: str) -> Iterator[None]:
        """Report another rank that is gone, late or has left as such, from the collectives in the block.

        Raises:
            PeerLostError: one is.
        """

        def who_left() -> str | None:
            return self.group.who_left() if self.group else None

        with contact(self._met, where, self._timeout_seconds, who_left):
            yield
