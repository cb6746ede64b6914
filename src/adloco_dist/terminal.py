"""What people read: lines, tables and waits, on a terminal, in a file, or in a pipe that nobody reads any more.

The one place where something is printed, so that no text from outside (a path, a setting, a library's message, what a
model writes) is taken for markup or for a command to the terminal, and no stream that is full or closed ends a run.
"""

import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table

from adloco_dist.text import one_line, printable

REPORT_AFTER_SECONDS, REPORT_EVERY_SECONDS = 5.0, 12.0
"""A wait longer than this is reported, and again after each further interval."""


class _Lasting(io.FileIO):
    """A descriptor whose writes never fail: what it does not take is lost, and `failure` keeps the reason."""

    failure: OSError | None = None

    def write(self, content: Any, /) -> int:
        while True:
            try:
                count = super().write(content)
            except OSError as error:
                self.failure = error
                return len(content)
            if count is not None:
                return count
            select.select([], [self], [])  # a terminal or pipe that another process has made non-blocking


def lasting_stream(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """A text stream on `descriptor` that outlives its reader and a full disk; what its encoding lacks is replaced."""
    buffer = io.BufferedWriter(_Lasting(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding=encoding, errors="replace", line_buffering=True)


def protect_streams() -> None:
    """Make this process' standard streams outlive whatever reads them. The first thing that a command does.

    A descriptor that was closed (`>&-`) is reopened on nothing: else the next file that is opened would take its
    number, and receive what libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
    # Streams that somebody else has put in their place stay as they are.
    if sys.stdout is sys.__stdout__:
        sys.stdout = lasting_stream(1, sys.stdout.encoding if sys.stdout else "utf-8")
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting_stream(2, sys.stderr.encoding if sys.stderr else "utf-8")


def output_was_lost() -> bool:
    """Whether standard output refused some of what was written to it; not if its reader had enough."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _Lasting) else None
    if failure is None or failure.errno == errno.EPIPE:
        return False
    report_error(f"error: standard output cannot be written ({failure.strerror}): what was to be shown is lost")
    return True


def report_line(line: object) -> None:
    """Print one line for the user, at once; never fails."""
    print(one_line(line), flush=True)


def report_error(line: object) -> None:
    """Print one line about what went wrong, on standard error, at once; never fails."""
    print(one_line(line), file=sys.stderr, flush=True)


def show(text: object, file: TextIO | None = None) -> None:
    """Print a text of several lines on standard output, or on `file`."""
    print(printable(text), file=file, flush=True)


def to_type(path: Path) -> str:
    """A path as a user types it here: short where it is below the working directory."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def new_console(file: TextIO | None = None, stderr: bool = False, min_width: int = 1) -> Console:
    """A console that takes every string as it is: no markup, no emoji, no guesses at highlights.

    Where it is no terminal, a line has at least `min_width` characters: nothing is squeezed into a file.
    """
    console = Console(file=file, stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, min_width)
    return console


def new_table(columns: Iterable[str], title: str | None = None, has_lines: bool = False) -> Table:
    """A table of numbers, which stand on the right of their columns, with lines around its cells or without."""
    heads = [Column(name, justify="right") for name in columns]
    return Table(*heads, title=title) if has_lines else Table(*heads, title=title, box=None, pad_edge=False)


@contextmanager
def reported_wait(line: Callable[[], str], speaks: bool = True) -> Iterator[None]:
    """Report on standard error what takes so long while the block runs, and again every few seconds.

    `line` is called in a thread of its own; of several processes that wait for the same, one `speaks`.
    """
    done = threading.Event()

    def report() -> None:
        seconds = REPORT_AFTER_SECONDS
        while not done.wait(seconds):
            report_error(line())
            seconds = REPORT_EVERY_SECONDS

    if speaks:
        threading.Thread(target=report, name="reported-wait", daemon=True).start()
    try:
        yield
    finally:
        done.set()
