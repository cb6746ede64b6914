"""How long the steps of a round take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Timing:
    """The wall time of a block, once it has ended."""

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Timing]:
    """Measure the wall time of the block, its work on the device included."""
    timing = Timing()
    wait_for(device)
    start = time.perf_counter()
    yield timing
    wait_for(device)
    # To the microsecond: a thousand ranks report these to rank 0.
    timing.seconds = round(time.perf_counter() - start, 6)


def wait_for(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
