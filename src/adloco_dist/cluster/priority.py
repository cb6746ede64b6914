"""Processes beside training, which leave the processor to the ranks."""

import os
from contextlib import suppress
from pathlib import Path

NICENESS = 10
"""A tenth of the weight of a rank; with a higher one nothing gets to its end beside ranks that compute on all cores."""
AUTOGROUP = Path("/proc/self/autogroup")
"""Linux may weigh sessions instead of processes (sched_autogroup_enabled): niceness then counts within one alone."""


def step_back() -> None:
    """Lower the priority of this process, and of its session if it has one of its own."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without them
            AUTOGROUP.write_text(str(NICENESS))
