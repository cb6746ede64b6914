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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console

LONGEST_LINE = 2000
"""Characters of a line that is told."""
LONGEST_REASON = 300
"""Characters of what a library says in it."""
TELL_AFTER_SECONDS, TELL_EVERY_SECONDS = 5.0, 12.0
"""What takes longer than this is told, and told again after each further interval."""


class _Lasting(io.RawIOBase):
    """A descriptor to which writing never fails: what it does not take is lost, and the reason kept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def write(self, content: Any, /) -> int:
        while True:
            try:
                return os.write(self._descriptor, content)
            except BlockingIOError:  # a terminal or pipe that another process has made non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error
                return len(content)


def lasting_stream(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """A text stream on `descriptor` that outlives its reader and a full disk; what its encoding lacks is replaced."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(descriptor)), encoding=encoding, errors="replace", line_buffering=True
    )


def protect_streams() -> None:
    """Make this process' standard streams outlive whatever reads them. The first thing that a command does.

    A descriptor that was closed (`>&-`) is opened anew on nothing: else the next file to be opened would take its
    number, and what libraries print would be written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
    # Streams that somebody else has put in their place are theirs.
    if sys.stdout is sys.__stdout__:
        sys.stdout = lasting_stream(1, sys.stdout.encoding if sys.stdout else "utf-8")
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting_stream(2, sys.stderr.encoding if sys.stderr else "utf-8")


def output_was_lost() -> bool:
    """Whether standard output did not take all that was written to it, which is told; not if its reader had enough."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    failure = raw.failure if isinstance(raw, _Lasting) else None
    if failure is None or failure.errno == errno.EPIPE:
        return False
    tell_error(f"error: standard output cannot be written ({failure.strerror}): what was to be shown is lost")
    return True


def printable(text: object) -> str:
    """`text` without what a terminal would obey: control characters other than line ends are shown as \\x1b."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(one if one.isprintable() or one in "\n\t" else _escaped(one) for one in shown)


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """`text` from outside as it is shown within a line: printable, line ends as spaces, cut off where too long."""
    shown = " ".join(printable(text).split())
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def first_line(error: BaseException) -> str:
    """What an exception says first, or its kind where it says nothing."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one_line(lines[0] if lines else type(error).__name__)


def reason(error: BaseException) -> str:
    """Why something failed, as the words of one line: what the system says, or the whole of the exception's text."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return one_line(said, LONGEST_REASON) or type(error).__name__


def tell(line: object) -> None:
    """Print one line for the user, at once; never fails."""
    print(one_line(line), flush=True)


def tell_error(line: object) -> None:
    """Print one line about what went wrong, on standard error, at once; never fails."""
    print(one_line(line), file=sys.stderr, flush=True)


def show(text: object, file: TextIO | None = None) -> None:
    """Print a text of several lines on standard output, or on `file`."""
    print(printable(text), file=file, flush=True)


def new_console(file: TextIO | None = None, stderr: bool = False, least_width: int | None = None) -> Console:
    """A console that takes every string as it is: no markup, no emoji, no guesses at highlights.

    Args:
        least_width: characters of a line at least where it is no terminal: nothing is squeezed into a file.
    """
    console = Console(file=file, stderr=stderr, markup=False, emoji=False, highlight=False)
    if least_width is not None and not console.is_terminal:
        console.width = max(console.width, least_width)
    return console


@contextmanager
def told_wait(
    line: Callable[[], str], speaks: bool = True, after_seconds: float = TELL_AFTER_SECONDS
) -> Iterator[None]:
    """Tell on standard error what takes so long while the block runs, and again every few seconds.

    Args:
        line: what to tell now; asked in a thread of its own.
        speaks: whether this process tells it at all; of several that wait for the same, one does.
    """
    done = threading.Event()

    def tell_on() -> None:
        seconds = TELL_AFTER_SECONDS
        while not done.wait(seconds):
            tell_error(line())
            seconds = TELL_EVERY_SECONDS

    thread = threading.Thread(target=tell_on, name="told-wait", daemon=True)
    if speaks:
        thread.start()
    try:
        yield
    finally:
        done.set()


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
