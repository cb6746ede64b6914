"""Processes beside training, which take the processor when the ranks leave it."""

import os
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
"""Linux may weigh sessions instead of processes (sched_autogroup_enabled): niceness then counts within one alone."""


def step_back(niceness: int) -> None:
    """Lower the priority of this process, and of its session if it has one of its own.

    Args:
        niceness: 0: none of it; 19: what takes the processor last.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without them
            AUTOGROUP.write_text(str(niceness))
