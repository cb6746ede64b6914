"""The log file of every rank; only rank 0 has the terminal, too."""

import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from adloco_dist.run.directory import LOGS_DIRECTORY
from adloco_dist.terminal import lasting_stream, report_line


@contextmanager
def logged(directory: Path, rank: int) -> Iterator[TextIO]:
    """Write events, warnings and tracebacks to the rank's log while the block runs, and all that ranks other than 0
    print. If the file cannot be made, the rank says so and goes on without it. Yields the terminal, for what a node
    other than rank 0's has to report."""
    path = directory / LOGS_DIRECTORY / f"rank{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        report_line(f"note: rank {rank} on {socket.gethostname()} keeps no log: {error}")
        yield sys.stdout
        return
    file = lasting_stream(descriptor)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("adloco_dist").setLevel(logging.INFO)
    logging.captureWarnings(True)
    faulthandler.enable(file)
    streams = () if rank == 0 else (sys.stdout, sys.stderr)
    before = [os.dup(stream.fileno()) for stream in streams]
    for stream in streams:  # by descriptor, so that what libraries in C print goes there too
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    yield lasting_stream(before[0], sys.stdout.encoding) if before else sys.stdout
    for stream, terminal in zip(streams, before, strict=True):
        stream.flush()
        os.dup2(terminal, stream.fileno())
        os.close(terminal)
    logging.getLogger().removeHandler(handler)
    faulthandler.disable()
    os.close(descriptor)
