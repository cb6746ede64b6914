"""Instances that do not fit on a device together: those that wait are in pinned CPU memory."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from adloco_dist.pool.worker import Worker

SLOTS = 2
"""Instances that swap share the device: one computes while the next is copied in and the last copied out."""


class Offload:
    """Which workers' weights and moments are on the device.

    The first `resident` - 2 stay there; the others share two slots and are brought in ahead of their turn, on a
    stream of their own. On a CPU the same copies are made, for tests alone. (torch rounds pinned memory up to powers of
    two, so it takes up to twice what the vectors hold.)
    """

    def __init__(self, device: torch.device, resident: int | None) -> None:
        """At most `resident` workers are on the device; None: all."""
        self._device, self.resident = device, resident
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[list[torch.Tensor]] = []
        self._homes: dict[Worker, list[torch.Tensor]] = {}

    def settle(self, workers: Sequence[Worker]) -> None:
        """Give every worker that must wait a place in CPU memory; called after the rank's workers have changed."""
        num_staying, device = len(workers), self._device
        if self.resident is not None and num_staying > self.resident:
            num_staying = max(0, self.resident - SLOTS)
        homes: dict[Worker, list[torch.Tensor]] = {}
        for worker in workers[:num_staying]:
            if worker.weights.device != device or worker in self._homes:
                worker.move([torch.empty_like(vector, device=device) for vector in worker.vectors()])
        for worker in workers[num_staying:]:
            homes[worker] = self._homes.get(worker) or [
                torch.empty_like(vector, device="cpu", pin_memory=device.type == "cuda") for vector in worker.vectors()
            ]
            worker.move(homes[worker])
        num_slots = min(SLOTS, self.resident or SLOTS) if homes else 0
        self._slots = [
            [torch.empty_like(vector, device=device) for vector in workers[-1].vectors()] for _ in range(num_slots)
        ]
        self._homes = homes
        self._wait_for_copies()

    def turns(self, workers: Sequence[Worker]) -> Iterator[Worker]:
        """Every worker in turn, on the device during its turn; all are back in their places after the last."""
        ahead: dict[Worker, torch.Event | None] = {}
        for place, worker in enumerate(workers):
            if worker not in ahead:
                ahead[worker] = self._bring(worker, place)
            if event := ahead.pop(worker):
                torch.cuda.current_stream(self._device).wait_event(event)
            if len(self._slots) > 1 and place + 1 < len(workers):
                ahead[workers[place + 1]] = self._bring(workers[place + 1], place + 1)
            yield worker
            if worker in self._homes:
                if self._copies is not None:  # copies out begin when the turn's work is done
                    self._copies.wait_stream(torch.cuda.current_stream(self._device))
                with self._copying():
                    worker.move(self._homes[worker])
        self._wait_for_copies()

    def _bring(self, worker: Worker, turn: int) -> torch.Event | None:
        """Copy a worker into the slot of the turn before last; if that is still copied out, copies keep their order."""
        if worker not in self._homes:
            return None
        with self._copying():
            worker.move(self._slots[turn % len(self._slots)])
        return self._copies and self._copies.record_event()

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def _wait_for_copies(self) -> None:
        """The CPU may read what was copied out only after it has arrived."""
        if self._copies is not None:
            self._copies.synchronize()
