"""Groups of gloo of a generation, without a default process group or a store of torch's beneath them."""

import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from adloco_dist.averaging.group import Group
from adloco_dist.members.calls import split
from adloco_dist.members.roll import Generation
from adloco_dist.members.seat import LOOK_SECONDS, Seat

ABORT_TAG = 0x7FFF_0000
"""Nobody sends anything with it."""


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


def connected(
    seat: Seat, generation: Generation, device: torch.device, timeout_seconds: float, patience: timedelta
) -> Group:
    """The group of a generation. Collective over its members.

    Args:
        seat: this member's.
        device: where tensors are.
        timeout_seconds: of one collective.
        patience: how long members wait for each other here.

    Raises:
        RuntimeError: the others have not come in time.
    """
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
