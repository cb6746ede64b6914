"""The control plane: small JSON messages between rank 0 and all ranks, over gloo whatever the tensors use."""

import json
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from adloco_dist.config import SettingsError

Message = dict[str, Any]
CLOCK_READINGS = 5


class ControlPlane:
    """Gathers reports to rank 0 and broadcasts plans from it. Collective: every rank makes the same calls.

    Messages are compressed JSON in tensors: nothing is ever unpickled.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.bytes_sent = 0
        """Payload bytes that this rank has sent to others so far."""

    def gather(self, message: Message) -> list[Message]:
        """Every rank's message by rank on rank 0; an empty list on the others."""
        payload = encode(message)
        if self.world_size == 1:
            return [decode(payload)]
        length = torch.tensor([len(payload)])
        lengths = [torch.empty_like(length) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(length, lengths, dst=0, group=self._group)
        if lengths is None:
            dist.send(payload, group=self._group, group_dst=0)
            self.bytes_sent += length.nbytes + len(payload)
            return []
        payloads = [payload, *(torch.empty(int(length), dtype=torch.uint8) for length in lengths[1:])]
        others = range(1, self.world_size)
        for work in [dist.irecv(payloads[rank], group=self._group, group_src=rank) for rank in others]:
            assert work is not None
            work.wait()
        return list(map(decode, payloads))

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message on every rank; the others pass None."""
        payload = encode(message) if message is not None else torch.empty(0, dtype=torch.uint8)
        if self.world_size == 1:
            return decode(payload)
        length = torch.tensor([len(payload)])
        dist.broadcast(length, src=0, group=self._group)
        if self.rank:
            payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        if self.rank == 0:
            self.bytes_sent += (8 + len(payload)) * (self.world_size - 1)
        return decode(payload)

    def exchange(self, message: Message) -> list[Message]:
        """Every rank's message by rank, on every rank."""
        messages = self.gather(message)
        return self.broadcast({"all": messages} if self.rank == 0 else None)["all"]

    def clock_offset_seconds(self) -> float:
        """How far this rank's clock is ahead of rank 0's.

        Rank 0's reading lies half-way between two of this rank's own, give or take half of the time between them. Of
        several pairs the closest counts (as in NTP, RFC 5905, section 8).
        """
        theirs = torch.zeros(1, dtype=torch.float64)
        readings = []
        for rank, _ in product(range(1, self.world_size), range(CLOCK_READINGS)):
            if self.rank == 0:
                dist.recv(theirs, group=self._group, group_src=rank)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), group=self._group, group_dst=rank)
            elif self.rank == rank:
                before = time.time()
                dist.send(theirs, group=self._group, group_dst=0)
                dist.recv(theirs, group=self._group, group_src=0)
                after = time.time()
                readings.append((after - before, (before + after) / 2 - theirs.item()))
        return min(readings)[1] if readings else 0.0

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let a mistake that any rank finds in the block end it on all ranks, as `agree` does."""
        error: SettingsError | None = None
        try:
            yield
        except SettingsError as mistake:
            error = mistake
        self.agree(error)

    def agree(self, error: SettingsError | None) -> None:
        """Raise on all ranks if any rank brings an error: one line that names the ranks where not all agree."""
        errors = [reply["error"] for reply in self.exchange({"error": str(error) if error else None})]
        failed = {line: [rank for rank, other in enumerate(errors) if other == line] for line in errors if line}
        if failed:
            line, ranks = next(iter(failed.items()))
            where = "" if len(ranks) == self.world_size else f" (on rank {', '.join(map(str, ranks))})"
            raise SettingsError(line + where)


def encode(message: Message) -> torch.Tensor:
    """A message as gloo carries it."""
    return torch.frombuffer(bytearray(packed(message)), dtype=torch.uint8)


def decode(payload: torch.Tensor) -> Message:
    """The message that was encoded."""
    return unpacked(payload.numpy().tobytes())


def packed(message: Message) -> bytes:
    """A message as it travels: compressed JSON, because a thousand ranks' reports meet at rank 0."""
    return zlib.compress(json.dumps(message, separators=(",", ":")).encode())


def unpacked(content: bytes) -> Message:
    """The message that was packed."""
    return json.loads(zlib.decompress(content))
