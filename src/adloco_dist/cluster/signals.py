"""A request to stop: a signal, or a file."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C; the end of a job or container; and what batch systems are told to send before a time limit."""


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop: this rank by a signal or a file, or, as it has heard, another one."""

    is_heard: bool = False
    """Set by a signal, or by the heartbeat; no more than a look, for it is asked before every update."""
    is_signalled: bool = False
    """Whether this process itself got a signal."""
    is_passed_on: bool = False
    """Whether all ranks know."""
    file: Path | None = None
    """Asks for it by being there: for those who cannot send a signal, such as a batch script on another node."""

    def wait_for_signal(self, seconds: float) -> None:
        """Until this very process gets one, at most so long."""
        deadline = time.monotonic() + seconds
        while not self.is_signalled and time.monotonic() < deadline:
            time.sleep(0.1)

    @property
    def requested(self) -> bool:
        return self.is_heard or (self.file is not None and self.file.exists())


@contextmanager
def stop_on_signals(request: StopRequest, signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Turn signals into a request while the block runs. Main thread only.

    A signal may come more than once (from the terminal and again from torchrun): it never ends the process.
    """

    def note(signum: int, frame: object) -> None:
        request.is_signalled = request.is_heard = True

    previous = {number: signal.signal(number, note) for number in signals}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends, however it ends.

    Args:
        parent: its process id, as of when this process was started.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        os.kill(os.getpid(), signal.SIGKILL)
