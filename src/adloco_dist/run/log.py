"""The log file of every rank; only rank 0 has the terminal, too."""

import faulthandler
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from adloco_dist.run.directory import LOGS_DIRECTORY
from adloco_dist.terminal import lasting_stream, report_line


def open_log(directory: Path, rank: int) -> TextIO:
    """Write events, warnings and tracebacks to the rank's log from here on, and all that ranks other than 0 print.
    If the file cannot be made, the rank says so and goes on without it. Returns the terminal, for what a node other
    than rank 0's has to report."""
    path = directory / LOGS_DIRECTORY / f"rank{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lasting_stream(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    except OSError as error:
        report_line(f"note: rank {rank} on {socket.gethostname()} keeps no log: {error}")
        return sys.stdout
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("adloco_dist").setLevel(logging.INFO)
    logging.captureWarnings(True)
    faulthandler.enable(file)
    if rank == 0:
        return sys.stdout
    terminal = lasting_stream(os.dup(sys.stdout.fileno()), sys.stdout.encoding)
    for stream in (sys.stdout, sys.stderr):  # by descriptor, so that what libraries in C print goes there too
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    return terminal
