"""Ctrl-C and SIGTERM as a request that the round loop honours at the next plan."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StopRequest:
    """Whether somebody asked this rank to stop; rank 0 sees it in the next report and stops all ranks together."""

    requested: bool = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request while the block runs. Main thread only.

    A signal may come more than once (from the terminal and again from torchrun): it never ends the process.
    """
    request = StopRequest()

    def note(signum: int, frame: object) -> None:
        request.requested = True

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    yield request
    for number, handler in previous.items():
        signal.signal(number, handler)
