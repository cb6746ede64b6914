"""Work that other processes do: a run's page when it ends, and while it trains, and what a page takes longest for."""

import gc
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from adloco_dist.config import SettingsError
from adloco_dist.text import one_line, reason

TOKEN = secrets.token_urlsafe()
"""What an address of this process' pages has at its end: who does not know it sees none."""
TOKEN_VARIABLE = "ADLOCO_WATCH_TOKEN"
"""Names the token to the process that a run starts: arguments are seen by everybody on a machine."""
PATIENCE_SECONDS = 120.0
"""Far longer than the page of any run takes."""
ANY_ADDRESS = ("0.0.0.0", "::")
MAX_HELPERS = 4
"""Each may take some 0.3 GB."""


@contextmanager
def helpers(running: Executor | None = None) -> Iterator[Executor]:
    """Processes for what keeps a core busy: those that are `running`, or others, which end with the block.

    Nothing is forked, as callers have threads. They hold many values and no cycles, so garbage collections would look
    at all of them in vain.
    """
    if running:
        yield running
        return
    number = min(MAX_HELPERS, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(number, get_context("spawn"), gc.disable) as processes:
        yield processes


def write_report(directory: Path) -> str:
    """Write the page of a run that has ended, or of a sweep; return where it is, or why there is none, in a line."""
    command = [sys.executable, "-m", "adloco_dist.report.write", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no report: {reason(error)}"
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    last = one_line(said[-1]) if said else f"exit code {done.returncode}"
    return f"no report: {last.removeprefix('error: ')}" if done.returncode else f"report: {last}"


def listen(given: str, address: str, port: int) -> socket.socket:
    """A socket that listens. If the port is in use, or the address is not of this machine, raises a SettingsError that
    begins with what was `given` ("run.watch=8000")."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        rule = f"cannot be listened on at {address} ({reason(error)}); name another port, or 0 for any that is free"
        raise SettingsError(f"{given}: {rule}") from error
    return listener


def address_of(listener: socket.socket, token: str) -> str:
    """Where a browser finds the page."""
    host, port = listener.getsockname()[:2]
    host = platform.node() if host in ANY_ADDRESS else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/{token}/"


@contextmanager
def shown_live(directory: Path, listener: socket.socket | None) -> Iterator[str | None]:
    """Show a run on `listener` while it trains, from a process that ends with this one; yield the address. Without a
    listener it is not shown, and has no address."""
    if listener is None:
        yield None
        return
    descriptor = listener.fileno()
    with (directory / "logs" / "watch.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "adloco_dist.report.watch", str(directory), "--descriptor", str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[descriptor],
            env={**os.environ, TOKEN_VARIABLE: TOKEN},
            start_new_session=True,
        )
    address = address_of(listener, TOKEN)
    listener.close()  # the process has it now
    try:
        yield address
    finally:
        process.terminate()
        process.wait()
