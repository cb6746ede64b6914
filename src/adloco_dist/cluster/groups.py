"""From rank sets to process groups, and the collectives that a run's tensors travel by."""

import threading
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from adloco_dist.config import Backend
from adloco_dist.decisions.records import set_of_ranks
from adloco_dist.terminal import first_line

RankSet = tuple[int, ...]
"""Distinct ranks, ascending."""

NCCL_COMMUNICATORS = 8
"""Most communicators of a rank unless the settings say otherwise."""
COMMUNICATOR_BYTES = 600_000_000
"""What a communicator of NCCL takes of the GPU's memory, roughly."""
CONNECT_SECONDS = 120.0
"""For the first collective of a group, in which NCCL connects its ranks."""
WATCHDOG_SECONDS = 60.0
"""How much later than a collective's own timeout torch's watchdog comes, which only ever has to end a hang of
DistributedDataParallel: nothing else waits without a timeout."""

# torchrun sets the first to 1 for all ranks. Then a thread of torch's throws when a collective is late, which aborts
# the process: no line about who was waited for, and an end that looks like a crash. With 2 it releases what hangs, and
# the call that waited for it raises. The others end the process when that thread is busy, or delay its end by a dump.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read whenever a group for NCCL is formed; to be set before the first."""


class GroupError(RuntimeError):
    """Ranks of a group cannot exchange tensors; one line that names them."""


class Group:
    """Ranks that exchange tensors. Collectives return when they are done, and raise on the calling thread.

    torch's own calls return at once with NCCL, and leave a failure to a thread that ends the process. A wait with a
    timeout, as here, blocks until the GPU is done; the result may be used on the current stream right away.

    Every method is collective over `ranks`, and raises a RuntimeError when the others do not come within the timeout
    or one of them is gone; no further collective of the group is possible then.
    """

    def __init__(
        self, ranks: RankSet, process_group: dist.ProcessGroup, device: torch.device, timeout_seconds: float
    ) -> None:
        """
        Args:
            device: where the tensors that travel are.
            timeout_seconds: of one collective.
        """
        self.ranks, self.process_group = ranks, process_group
        self._device = device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._is_connected = False

    def connect(self) -> None:
        """Let the ranks connect to each other, unless they have.

        NCCL does so in the first collective of a group, which has no timeout then: where the network lets nothing
        through, it never returns. So that one is issued by a thread of its own, and given up after CONNECT_SECONDS.

        Raises:
            GroupError: they cannot.
        """
        if self._is_connected:
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL takes its memory from the driver, not from torch's cache
        failures: list[Exception] = []

        def first() -> None:
            try:
                work = dist.all_reduce(torch.zeros(1, device=self._device), group=self.process_group, async_op=True)
                _wait(work, timedelta(seconds=CONNECT_SECONDS))
            except Exception as error:  # raised by the thread that waits for this one
                failures.append(error)

        thread = threading.Thread(target=first, name="connect", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        if thread.is_alive() or failures:
            why = first_line(failures[0]) if failures else f"timed out after {CONNECT_SECONDS:g} s"
            told = f"ranks {set_of_ranks(self.ranks)} cannot exchange tensors ({why})"
            raise GroupError(told) from (failures[0] if failures else None)
        self._is_connected = True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum of all ranks' tensors, in the same bits on each."""
        self.connect()
        _wait(dist.all_reduce(tensor, group=self.process_group, async_op=True), self._timeout)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes_in: Sequence[int], sizes_out: Sequence[int]
    ) -> None:
        """Send every rank its part of `sent`, and fill `received` with the parts from every rank.

        Args:
            sizes_in: elements from each rank, in the order of `ranks`.
            sizes_out: elements to each rank.
        """
        self.connect()
        sizes = list(sizes_in), list(sizes_out)
        work = dist.all_to_all_single(received, sent, *sizes, group=self.process_group, async_op=True)
        _wait(work, self._timeout)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in the order of `ranks`, on the lowest of them; an empty list on the others.

        Args:
            tensor: of one shape on all ranks.
        """
        self.connect()
        root = self.ranks[0]
        received = [torch.empty_like(tensor) for _ in self.ranks] if dist.get_rank() == root else []
        _wait(dist.gather(tensor, received or None, root, group=self.process_group, async_op=True), self._timeout)
        return received

    def broadcast_each(self, parts: Sequence[torch.Tensor]) -> None:
        """Fill every part with what the rank in the same place of `ranks` has in it; all parts travel at once."""
        self.connect()
        works = [
            dist.broadcast(part, source, group=self.process_group, async_op=True)
            for source, part in zip(self.ranks, parts, strict=True)
        ]
        for work in works:
            _wait(work, self._timeout)


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    assert work is not None  # this rank is in the group
    work.wait(timeout)


def form_group(ranks: RankSet, backend: Backend, timeout_seconds: float) -> Group | None:
    """A new group; None on other ranks. Collective over the whole world.

    Args:
        ranks: two or more.
        timeout_seconds: of one collective.
    """
    device, seconds = torch.device("cpu"), timeout_seconds
    if backend is Backend.nccl:
        device, seconds = torch.device("cuda", torch.cuda.current_device()), timeout_seconds + WATCHDOG_SECONDS
    made = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend=backend.name)
    # Ranks outside get a number.
    return Group(ranks, made, device, timeout_seconds) if isinstance(made, dist.ProcessGroup) else None


def num_communicators_to_come(num_formed: int, num_trainers: int, most: int) -> int:
    """Groups that a rank can be in at one time after merges, beyond those that it is in now.

    Every merge leaves one trainer less at least, and a rank is in one group of each trainer at most.

    Args:
        num_formed: groups that the rank is in.
        num_trainers: of the pool, before the next merge.
        most: groups that a rank may be in.
    """
    return max(0, min(most, num_trainers - 1) - num_formed)


class Groups:
    """Groups for tensors, one per rank set, formed when they are first asked for and kept while in use.

    Everything here is collective over the whole world: every rank makes the same calls in the same order, also for
    sets that it is not in. (`use_local_synchronization` would spare the others the call, but its names collide when
    a set of ranks is formed again, and it hangs.)
    """

    def __init__(self, backend: Backend, timeout_seconds: float, most: int | None = None) -> None:
        """
        Args:
            timeout_seconds: of one collective.
            most: groups that a rank may be in at one time; None: any number, 8 with NCCL.
        """
        self._backend, self._timeout_seconds = backend, timeout_seconds
        self._most = NCCL_COMMUNICATORS if most is None and backend is Backend.nccl else most
        # All ranks know all sets, least recently used first, so that all release the same.
        self._groups: dict[RankSet, Group | None] = {}

    @property
    def formed(self) -> list[RankSet]:
        """The sets that have a group now, least recently used first."""
        return list(self._groups)

    def of(self, ranks: RankSet) -> Group | None:
        """The group of these ranks, formed if need be; None on other ranks, and where a rank is alone."""
        if len(ranks) < 2:
            return None
        if ranks in self._groups:
            group = self._groups.pop(ranks)
        else:
            self._make_room(ranks)
            group = form_group(ranks, self._backend, self._timeout_seconds)
        self._groups[ranks] = group
        return group

    def form_all(self, rank_sets: Sequence[RankSet]) -> None:
        """Form and connect the groups of all these sets, in the order in which they will be used; release all others.

        Raises:
            GroupError: the ranks of one, this rank among them, cannot exchange tensors. All are formed then, on all
                ranks; those after it are not connected.
        """
        self.keep(rank_sets)
        for ranks in rank_sets:
            self.of(ranks)
        for group in self._groups.values():  # now, when all ranks have come here at the same time
            if group is not None:
                group.connect()

    def crowding(self, rank_sets: Collection[RankSet]) -> str | None:
        """What to tell where ranks are in more of these sets than may be formed at one time; None: they are not."""
        sets = {ranks for ranks in rank_sets if len(ranks) > 1}
        needed = max((sum(rank in ranks for ranks in sets) for rank in set().union(*sets)), default=0)
        if self._most is None or needed <= self._most:
            return None
        remedy = f"set cluster.max_communicators={needed} if the devices' memory allows, or use fewer trainers per rank"
        return (
            f"a rank is in {needed} groups, of which {self._most} may be formed at one time: groups are formed anew in "
            f"every round, which takes its time; {remedy}"
        )

    def bytes_to_come(self, rank: int, num_trainers: int) -> int:
        """Memory of the rank's GPU for groups that merges of a pool of so many trainers may bring; 0 with gloo."""
        if self._backend is not Backend.nccl or self._most is None:
            return 0
        num_formed = sum(rank in ranks for ranks in self._groups)
        return num_communicators_to_come(num_formed, num_trainers, self._most) * COMMUNICATOR_BYTES

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
                dist.destroy_process_group(group.process_group)
