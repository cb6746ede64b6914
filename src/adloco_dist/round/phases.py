"""How long the phases of a round take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def timed(seconds: dict[str, float], phase: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of the block to `seconds[phase]`, its work on the device included."""
    wait_for(device)
    start = time.perf_counter()
    yield
    wait_for(device)
    # To the microsecond: a thousand ranks report these to rank 0.
    seconds[phase] = round(seconds.get(phase, 0.0) + time.perf_counter() - start, 6)


def wait_for(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
