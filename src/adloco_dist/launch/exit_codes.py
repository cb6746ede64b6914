"""How ranks end: in agreement, which the driver that started them learns of, or with their agent."""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from adloco_dist.cluster.signals import end_with_parent
from adloco_dist.command import reported_in_one_line
from adloco_dist.config import EXIT_STOPPED, EXIT_USER_ERROR
from adloco_dist.launch.launchers import is_torchrun_rank, speaks_for_node
from adloco_dist.terminal import protect_streams

OUTCOME = "ADLOCO_OUTCOME"
"""Environment variable of ranks that a driver has started: a folder, where each of them has a file."""
REPORT_SECONDS = 10.0
"""The first rank of a node reports why all ranks end within this, and torchrun's agent ends the others."""
AGENT = "ADLOCO_AGENT"
"""Environment variable of those ranks as well: the driver's process id."""


@contextmanager
def ends_reported() -> Iterator[bool]:
    """Surround all that a command does, on a rank and in the driver; yield whether this process is a rank.

    All ranks raise what one of them finds: on every node the first of its ranks reports it.
    """
    protect_streams()
    with reported_in_one_line():
        is_rank = is_torchrun_rank()
    if is_rank:
        # Before anything heavy is imported: torchrun killed with -9 leaves no ranks behind from here on.
        end_with_parent(int(os.environ.get(AGENT, os.getppid())))
    speaks = speaks_for_node()
    with _ends_immediately(speaks) if is_rank else nullcontext(), reported_in_one_line(speaks):
        yield is_rank


@contextmanager
def _ends_immediately(speaks: bool) -> Iterator[None]:
    """End the process where the block exits; note a code that all ranks agreed on for the driver.

    torchrun's agent takes every code but 0 for the failure of one rank: it ends the others, and with itself the store
    that agents of other nodes still need. Under torchrun alone nobody reads notes, and the process ends with the code,
    that of the rank that speaks first: the agent then ends all others.

    The interpreter is not taken down: a thread of gloo that frees its last work meanwhile would ask for the lock of an
    interpreter that has ended, and abort the process (torch 2.13; one refusal in sixty).
    """
    folder = os.environ.get(OUTCOME)
    note = Path(folder) / os.environ["LOCAL_RANK"] if folder else None
    if note:
        note.write_text("", encoding="utf-8")  # of an earlier start, too
    code: str | int | None = None
    try:
        yield
    except SystemExit as end:
        code = end.code
        if code not in (None, 0, EXIT_USER_ERROR, EXIT_STOPPED):
            raise
    if note and code:
        note.write_text(str(code), encoding="utf-8")
    elif code and not speaks:
        signal.sigtimedwait([signal.SIGTERM], REPORT_SECONDS)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if note else int(code or 0))


def end_driver(code: int) -> NoReturn:
    """End a driver that has had ranks, or waits in a library, from any thread; nothing is left behind.

    The interpreter is not taken down: a thread that comes back from torch's store meanwhile aborts the process.
    """
    if folder := os.environ.get(OUTCOME):
        shutil.rmtree(Path(folder).parent, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def highest_noted_code(folder: Path) -> int:
    """Return the highest exit code that ranks of this node have noted; 0 where none did."""
    return max((int(note.read_text(encoding="utf-8") or 0) for note in folder.iterdir()), default=0)
