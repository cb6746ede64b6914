"""Groups of gloo of a generation, without a default process group or a store of torch's beneath them."""

import ctypes
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from adloco_dist.averaging.group import Group, GroupError, PendingCollective
from adloco_dist.members.calls import split
from adloco_dist.members.roll import Generation
from adloco_dist.members.seat import LOOK_SECONDS, Seat

BREAK_TAG = 0x7FFF_0000
"""Nobody sends anything with it."""
DONE, BROKEN = "done", "broken"
"""Outcomes of a wait, beside errors."""
GRACE_SECONDS = 0.2
"""What a wait that is broken off has left to end by itself."""


class GenerationStore(Store):
    """Where members of a generation tell each other how to connect: with the first of them.

    Its waits end when that one is gone or the generation is over. Those of torch's TCPStore need an answer of its host
    to end, also after their timeout, and never do where its machine is lost (docs/lab-notes.md).
    """

    def __init__(self, seat: Seat, generation: Generation) -> None:
        super().__init__()
        self._seat, self._generation = seat, generation
        self._values: dict[str, str] = {}

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  (what comes)
        """Tell all members something."""
        self._exchange({key: b64encode(value).decode()})

    def get(self, key: str) -> bytes:
        """What a member has told; `wait` came before."""
        return b64decode(self._values[key])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for what members tell; a DistStoreError says that it does not come."""
        end = time.monotonic() + timeout.total_seconds()
        while missing := [key for key in keys if key not in self._values]:
            self._exchange({})
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{missing[0]} timed out after {timeout.total_seconds():g} s")
            time.sleep(LOOK_SECONDS)

    def _exchange(self, stored: dict[str, str]) -> None:
        first = self._generation.members[0]
        reply = self._seat.ask(first, "store", self._generation, stored=stored)
        newest = Generation.of(reply["generation"]) if reply else None
        if reply is None or newest is None or newest.name != self._generation.name or reply["is_over"]:
            raise dist.DistStoreError(f"{first} does not go on with generation {self._generation.name}")
        self._values = reply["stored"]


class BreakableGroup(Group):
    """A group whose waits another thread can end."""

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, connect_seconds: float
    ) -> None:
        """Of all ranks of a process group; arguments as of `Group`."""
        ranks = tuple(range(process_group.size()))
        super().__init__(ranks, process_group, device, timeout_seconds, connect_seconds)
        self._is_broken = False
        self._under_way: list[dist.Work] = []
        self._waits: set[BreakableWait] = set()

    def break_off(self) -> None:
        """Close all connections, and end all waits for them, in whatever thread; each raises a RuntimeError.

        gloo does the first, and most of the second, when a receive is late, as these are. But who waits for a message
        of which a part has been sent or received is forgotten (docs/lab-notes.md).
        """
        for peer in range(len(self.ranks)):
            with suppress(RuntimeError, AttributeError):  # late, as it should be; or closed before
                if peer != self.index:
                    self.process_group.recv([torch.empty(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
        self._is_broken = True
        for wait in tuple(self._waits):
            wait.break_off()

    def close(self) -> None:
        """Close this member's connections."""
        if not all(work.is_completed() for work in self._under_way):
            _keep(self.process_group)
        super().close()

    def _pending(self, work: dist.Work | None) -> PendingCollective:
        assert work is not None  # this member is in the group
        self._under_way.append(work)
        return BreakableWait(work, self._timeout, self)

    def begin(self, wait: "BreakableWait") -> None:
        """A wait begins."""
        self._waits.add(wait)
        if self._is_broken:
            wait.break_off()

    def end(self, wait: "BreakableWait", work: dist.Work | None) -> None:
        """A wait ends; for a collective that is over, or for none."""
        self._waits.discard(wait)
        if work is not None:
            self._under_way.remove(work)


class BreakableWait(PendingCollective):
    """A collective under way whose wait another thread can end."""

    def __init__(self, work: dist.Work, timeout: timedelta, group: BreakableGroup) -> None:
        super().__init__(work, timeout)
        self._group = group
        self._outcomes = SimpleQueue[RuntimeError | str]()

    def wait(self) -> None:
        """Block until it is done or broken off."""
        threading.Thread(target=self._await, name="wait", daemon=True).start()
        self._group.begin(self)
        outcome = self._outcomes.get()
        if outcome == BROKEN:
            with suppress(Empty):
                outcome = self._outcomes.get(timeout=GRACE_SECONDS)
        self._group.end(self, self._work if outcome != BROKEN else None)
        if outcome == BROKEN:
            raise GroupError("broken off while a message was on its way")
        if isinstance(outcome, RuntimeError):
            raise outcome

    def break_off(self) -> None:
        """End the wait, from another thread."""
        self._outcomes.put(BROKEN)

    def _await(self) -> None:
        try:
            super().wait()
        except RuntimeError as error:  # raised by the thread that waits for this one
            self._outcomes.put(error)
        else:
            self._outcomes.put(DONE)


def connected(
    seat: Seat, generation: Generation, device: torch.device, timeout_seconds: float, patience: timedelta
) -> BreakableGroup:
    """The group of a generation. Collective over its members.

    gloo connects in a thread, which is left behind where the generation is over before all have come.

    Args:
        seat: this member's.
        device: where tensors are.
        timeout_seconds: of one collective.
        patience: how long members wait for each other here.

    Raises:
        RuntimeError: the others have not come in time.
    """
    outcomes, is_left = SimpleQueue[BreakableGroup | RuntimeError](), threading.Event()

    def connect() -> None:
        try:
            group = _connected(seat, generation, device, timeout_seconds, patience)
        except RuntimeError as error:  # raised by the thread that waits for this one
            outcomes.put(error)
            return
        if is_left.is_set():
            group.close()
        else:
            outcomes.put(group)

    threading.Thread(target=connect, name="connect", daemon=True).start()
    while True:
        with suppress(Empty):
            outcome = outcomes.get(timeout=LOOK_SECONDS)
            break
        if seat.roll.is_over:
            is_left.set()
            raise GroupError(f"generation {generation.name} is over before all have connected")
    if isinstance(outcome, RuntimeError):
        raise outcome
    return outcome


def _connected(
    seat: Seat, generation: Generation, device: torch.device, timeout_seconds: float, patience: timedelta
) -> BreakableGroup:
    rank, size = generation.members.index(seat.address), len(generation.members)
    store, (host, _) = GenerationStore(seat, generation), split(seat.address)
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
    group = BreakableGroup(made, device, timeout_seconds, patience.total_seconds())
    try:
        group.connect()
    except GroupError:
        _keep(made)
        raise
    return group


def _keep(process_group: dist.ProcessGroup) -> None:
    """Never free a process group: that waits for its threads, and nothing may end what one of them waits for."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
