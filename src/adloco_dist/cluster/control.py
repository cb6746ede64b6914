"""The control plane: small JSON messages between rank 0 and all ranks, over gloo whatever the tensors use."""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from adloco_dist.config import SettingsError

Message = dict[str, Any]


class ControlPlane:
    """Gathers reports to rank 0 and broadcasts plans from it. Collective: every rank makes the same calls.

    Messages are JSON bytes in tensors: nothing is ever unpickled.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.bytes_sent = 0
        """Payload bytes that this rank has sent to others so far."""

    def gather(self, message: Message) -> list[Message]:
        """Every rank's message by rank on rank 0; an empty list on the others."""
        payload = _encode(message)
        if self.world_size == 1:
            return [_decode(payload)]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(payload)]), group=self._group)
        longest = max(int(length) for length in lengths)
        slot = torch.zeros(longest, dtype=torch.uint8)
        slot[: len(payload)] = payload
        slots = [torch.empty_like(slot) for _ in lengths] if self.rank == 0 else None
        dist.gather(slot, slots, dst=0, group=self._group)
        self.bytes_sent += 8 * (self.world_size - 1) + (longest if self.rank else 0)
        return [_decode(slot[: int(length)]) for slot, length in zip(slots or [], lengths, strict=False)]

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message on every rank; the others pass None."""
        payload = _encode(message) if message is not None else torch.empty(0, dtype=torch.uint8)
        if self.world_size == 1:
            return _decode(payload)
        length = torch.tensor([len(payload)])
        dist.broadcast(length, src=0, group=self._group)
        if self.rank:
            payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        if self.rank == 0:
            self.bytes_sent += (8 + len(payload)) * (self.world_size - 1)
        return _decode(payload)

    def exchange(self, message: Message) -> list[Message]:
        """Every rank's message by rank, on every rank."""
        messages = self.gather(message)
        return self.broadcast({"all": messages} if self.rank == 0 else None)["all"]

    def agree(self, error: SettingsError | None) -> None:
        """Raise on all ranks if any rank brings an error: one line that names the ranks where not all agree."""
        errors = [reply["error"] for reply in self.exchange({"error": str(error) if error else None})]
        failed = {line: [rank for rank, other in enumerate(errors) if other == line] for line in errors if line}
        if failed:
            line, ranks = next(iter(failed.items()))
            where = "" if len(ranks) == self.world_size else f" (on rank {', '.join(map(str, ranks))})"
            raise SettingsError(line + where)


def _encode(message: Message) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(json.dumps(message).encode(), dtype=np.uint8).copy())


def _decode(payload: torch.Tensor) -> Message:
    return json.loads(payload.numpy().tobytes())
