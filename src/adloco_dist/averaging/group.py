"""Ranks that exchange tensors, with a timeout on every wait."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adloco_dist.text import first_line, one_line, set_of_ranks

RankSet = tuple[int, ...]
"""Distinct ranks, ascending."""
NCCL_SAYS = "Last error:"
"""After it, an exception of NCCL has what it found."""


class GroupError(RuntimeError):
    """Ranks of a group cannot exchange tensors; one line that names them."""


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's present one; a new thread's is the first GPU, whatever the others use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_staged(device: torch.device, backend: str) -> bool:
    """Whether what is sent from this device, or received there, passes through CPU memory.

    gloo's send and receive hand an address to a socket, which knows CPU memory alone; NCCL reads the GPU's. (gloo's
    other collectives copy tensors of a GPU by themselves.)
    """
    return device.type == "cuda" and backend == "gloo"


def _said(error: Exception) -> str:
    """Why ranks could not connect: what NCCL says last, after its place and version; else the first line."""
    _, _, last = str(error).partition(NCCL_SAYS)
    return one_line(last) or first_line(error)


class PendingCollective:
    """A collective under way: its tensors belong to it until `wait` returns."""

    def __init__(self, work: dist.Work | None, timeout: timedelta) -> None:
        assert work is not None  # this rank is in the group
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        """Block until it is done, or raise as `Group` does; the current stream may use the result right away."""
        self._work.wait(self._timeout)


class Group:
    """Ranks that exchange tensors. Collectives return when they are done, and raise on the calling thread.

    torch's own calls return at once with NCCL, and leave a failure to a thread that ends the process. A wait with a
    timeout, as here, blocks until the GPU is done; the result may be used on the current stream right away.

    Every method is collective over `ranks`, and raises a RuntimeError when the others do not come within the timeout
    or one of them is gone; no further collective of the group is possible then.

    Attributes:
        device: where the tensors that travel are.
    """

    def __init__(
        self,
        ranks: RankSet,
        process_group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
        connect_seconds: float,
        is_connected: bool = False,
    ) -> None:
        """
        Args:
            device: of a GPU with its index: threads would take the first one.
            timeout_seconds: timeout of one collective.
            connect_seconds: timeout of the first one, in which NCCL connects its ranks.
            is_connected: whether they have exchanged tensors already.
        """
        assert device.type != "cuda" or device.index is not None
        self.ranks, self.process_group, self.device = ranks, process_group, device
        self._rank = dist.get_global_rank(process_group, process_group.rank())
        self._timeout = timedelta(seconds=timeout_seconds)
        self._connect_seconds = connect_seconds
        self._is_connected = is_connected
        self._last_work: dist.Work | None = None

    @property
    def index(self) -> int:
        """This rank's place in `ranks`."""
        return self.ranks.index(self._rank)

    def connect(self) -> None:
        """Let the ranks connect to each other, unless they have; a GroupError says that they cannot.

        NCCL does so in the first collective of a group, which has no timeout then: where the network lets nothing
        through, it never returns. So that one is issued by a thread of its own, and given up after `connect_seconds`.
        """
        if self._is_connected:
            return
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL takes its memory from the driver, not from torch's cache
        failures: list[Exception] = []

        def first() -> None:
            try:
                use_device(self.device)
                work = dist.all_reduce(torch.zeros(1, device=self.device), group=self.process_group, async_op=True)
                PendingCollective(work, timedelta(seconds=self._connect_seconds)).wait()
            except Exception as error:  # raised by the thread that waits for this one
                failures.append(error)

        thread = threading.Thread(target=first, name="connect", daemon=True)
        thread.start()
        thread.join(self._connect_seconds)
        if thread.is_alive() or failures:
            why = _said(failures[0]) if failures else f"timed out after {self._connect_seconds:g} s"
            line = f"ranks {set_of_ranks(self.ranks)} cannot exchange tensors ({why})"
            raise GroupError(line) from (failures[0] if failures else None)
        self._is_connected = True

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingCollective:
        """Start to replace the tensor by the sum of all ranks' tensors, in the same bits on each."""
        return self._start(dist.all_reduce, tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum of all ranks' tensors, in the same bits on each."""
        self.start_all_reduce(tensor).wait()

    def broadcast(self, tensor: torch.Tensor, source: int | None = None) -> None:
        """Replace the tensor by that of one of the ranks; None: the lowest's."""
        self._start(dist.broadcast, tensor, self.ranks[0] if source is None else source).wait()

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's whole numbers, of 64 bits each, in the order of `ranks`; as many from each rank."""
        # A sum, which every backend has for every device that it knows.
        table = torch.zeros(len(self.ranks), len(numbers), dtype=torch.int64, device=self.device)
        table[self.index] = torch.tensor(numbers)
        self.all_reduce(table)
        return table.tolist()

    def exchange_text(self, text: str) -> list[str]:
        """Every rank's text, in the order of `ranks`."""
        content = list(text.encode())
        lengths = [length for (length,) in self.exchange([len(content)])]
        padding = [0] * (max(lengths) - len(content))
        rows = self.exchange(content + padding)
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def exchange_tensors(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send every other rank its tensor, and fill that in its place of `received` with what it sends here; empty
        ones do not travel."""
        size, place = len(self.ranks), self.index
        from_places, to_places = ([(place + sign * step) % size for step in range(1, size)] for sign in (-1, 1))
        self.send_and_receive(
            [(self.ranks[i], sent[i]) for i in to_places if sent[i].numel()],
            [(self.ranks[i], received[i]) for i in from_places if received[i].numel()],
        )

    def send_and_receive(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send tensors to ranks of the group, and fill others with what ranks of it send; not collective.

        Receives are posted before sends: gloo tells the sender that there is room over the same connection, where it
        would wait behind what this rank sends, and both directions would take turns (docs/lab-notes.md).
        """
        self.connect()
        near = {id(tensor): self._near(tensor) for _, tensor in sent}  # one that goes to several ranks is copied once
        arriving = [(rank, self._near(tensor, is_filled=False)) for rank, tensor in received]
        operations = [dist.P2POp(dist.irecv, tensor, rank, self.process_group) for rank, tensor in arriving]
        operations += [dist.P2POp(dist.isend, near[id(tensor)], rank, self.process_group) for rank, tensor in sent]
        if not operations:
            return
        for pending in [self._pending(work) for work in dist.batch_isend_irecv(operations)]:
            pending.wait()
        for (_, tensor), (_, arrived) in zip(received, arriving, strict=True):
            if arrived is not tensor:
                tensor.copy_(arrived)

    def among(self, ranks: RankSet) -> "Group":
        """Some ranks of this group, which has connected them: they may send and receive, and take no collectives."""
        timeout_seconds = self._timeout.total_seconds()
        return Group(ranks, self.process_group, self.device, timeout_seconds, self._connect_seconds, is_connected=True)

    def close(self) -> None:
        """Close this rank's connections; what travels keeps them until it has arrived."""
        self._last_work = None
        if distributed_c10d._world.pg_map.get(self.process_group):  # the user may have destroyed all groups
            dist.destroy_process_group(self.process_group)
        distributed_c10d._world.pg_group_ranks.pop(self.process_group, None)  # of one without a default group beneath
        del self.process_group

    def _near(self, tensor: torch.Tensor, is_filled: bool = True) -> torch.Tensor:
        """What travels for a tensor: itself, or one in CPU memory where the backend sends no other."""
        if not is_staged(tensor.device, self.process_group._get_backend(tensor.device).name()):
            return tensor
        return tensor.cpu() if is_filled else torch.empty_like(tensor, device="cpu")

    def _start(self, collective: Callable[..., dist.Work | None], *arguments: object) -> PendingCollective:
        self.connect()
        return self._pending(collective(*arguments, group=self.process_group, async_op=True))

    def _pending(self, work: dist.Work | None) -> PendingCollective:
        # gloo's threads must not be the last to hold it: they would free its tensors while the interpreter ends, and
        # abort the process (docs/lab-notes.md).
        self._last_work = work
        return PendingCollective(work, self._timeout)


def worker_in_words(group: Group | None) -> str:
    """Which of the workers that average this rank has; None: it is alone."""
    return f"worker {group.index} of {len(group.ranks)}" if group else "worker 0 of 1"


def group_of(process_group: dist.ProcessGroup | None, device: torch.device, timeout_seconds: float) -> Group | None:
    """The group of a user's process group, or of the default one; None where its rank is alone.

    A ValueError of one line says that there is no such group, or that it cannot exchange tensors of the device.
    """
    if process_group is None:
        if not dist.is_initialized():
            rule = "torch.distributed has no default process group; call torch.distributed.init_process_group() first"
            raise ValueError(f"group=None: {rule}")
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError("group: this rank is not in it; construct DiLoCo on its ranks alone")
    ranks = tuple(dist.get_process_group_ranks(process_group))
    if len(ranks) == 1:
        return None
    if device.type not in {known.type for known in process_group._device_types}:
        rule = f"cannot exchange tensors on {device}; give it a backend for {device.type}"
        raise ValueError(f"group: its backend {dist.get_backend(process_group)} {rule}")
    return Group(ranks, process_group, device, timeout_seconds, connect_seconds=timeout_seconds)


def ring_bytes_sent(num_bytes: int, num_ranks: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `num_bytes`: 2 (n - 1) / n of them."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks
