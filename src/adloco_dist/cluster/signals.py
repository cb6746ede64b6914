"""A request to stop, which the round loop honours at the next plan: a signal, or a file."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C; the end of a job or container; and what batch systems are told to send before a time limit."""


@dataclass
class StopRequest:
    """Whether somebody asked this rank to stop; rank 0 sees it in the next report and stops all ranks together."""

    signalled: bool = False
    file: Path | None = None
    """Asks for it by being there: for those who cannot send a signal, such as a batch script on another node."""

    @property
    def requested(self) -> bool:
        return self.signalled or (self.file is not None and self.file.exists())


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn `STOP_SIGNALS` into a request while the block runs. Main thread only.

    A signal may come more than once (from the terminal and again from torchrun): it never ends the process.
    """
    request = StopRequest()

    def note(signum: int, frame: object) -> None:
        request.signalled = True

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    yield request
    for number, handler in previous.items():
        signal.signal(number, handler)
