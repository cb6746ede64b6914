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
    stream of their own. On a CPU the same copies are made, to no purpose but that of a test. (torch rounds pinned
    memory up to powers of two: up to twice what the vectors hold.)
    """

    def __init__(self, device: torch.device, resident: int | None) -> None:
        """
        Args:
            resident: maximum number of workers on the device; None: all.
        """
        self._device, self.resident = device, resident
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[list[torch.Tensor]] = []
        self._homes: dict[Worker, list[torch.Tensor]] = {}

    def settle(self, workers: Sequence[Worker]) -> None:
        """Give every worker that must wait a place in CPU memory; called when the rank's workers have changed."""
        num_staying = len(workers)
        if self.resident is not None and num_staying > self.resident:
            num_staying = max(0, self.resident - SLOTS)
        homes = {}
        for place, worker in enumerate(workers):
            if place >= num_staying:
                homes[worker] = self._homes.get(worker) or [
                    _pinned(vector, self._device) for vector in worker.vectors()
                ]
                worker.move(homes[worker])
            elif worker.weights.device != self._device or worker in self._homes:
                worker.move([torch.empty_like(vector, device=self._device) for vector in worker.vectors()])
        self._homes = homes
        self._slots = []
        if homes:
            vectors = next(iter(homes)).vectors()
            num_slots = min(SLOTS, self.resident or SLOTS)
            self._slots = [
                [torch.empty_like(vector, device=self._device) for vector in vectors] for _ in range(num_slots)
            ]
        self._wait_for_copies()

    def turns(self, workers: Sequence[Worker]) -> Iterator[Worker]:
        """Every worker in turn, on the device while it has its turn; all are back when the last has ended."""
        ahead: dict[Worker, torch.cuda.Event | None] = {}
        for place, worker in enumerate(workers):
            if worker not in ahead:
                ahead[worker] = self._bring(worker, place)
            if event := ahead.pop(worker):
                torch.cuda.current_stream(self._device).wait_event(event)
            following = workers[place + 1 : place + 2] if len(self._slots) > 1 else ()
            for upcoming in following:
                ahead[upcoming] = self._bring(upcoming, place + 1)
            yield worker
            if worker in self._homes:
                with self._copying():
                    worker.move(self._homes[worker])
        self._wait_for_copies()

    def _bring(self, worker: Worker, turn: int) -> torch.cuda.Event | None:
        """Copy into the slot that was left the turn before last, or is being left: copies keep their order."""
        if worker not in self._homes:
            return None
        if self._copies is None:
            worker.move(self._slots[turn % len(self._slots)])
            return None
        with torch.cuda.stream(self._copies):
            worker.move(self._slots[turn % len(self._slots)])
            event = torch.cuda.Event()
            event.record()
        return event

    def _copying(self) -> AbstractContextManager[object]:
        """Copies out begin when the turn's work is done."""
        if self._copies is None:
            return nullcontext()
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._copies)

    def _wait_for_copies(self) -> None:
        """The CPU reads what was copied out: not before it has arrived."""
        if self._copies is not None:
            self._copies.synchronize()


def _pinned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=device.type == "cuda")
