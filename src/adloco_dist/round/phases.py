"""How long the phases of a round take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def timed(seconds: dict[str, float], phase: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of the block to `seconds[phase]`, the device's outstanding work included."""
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
