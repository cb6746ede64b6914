"""How commands end: a mistake of the user is told in one line, with exit codes that scripts can use."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from adloco_dist.terminal import one_line, output_was_lost, protect_streams, tell_error

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
"""Asked to stop before the budget was spent: start it again (sysexits.h, EX_TEMPFAIL)."""
LONGEST_VALUE = 300
"""Characters of a value that is told."""


class SettingsError(ValueError):
    """A mistake of the user. One line: the setting, its value, what is allowed, what to do."""


def require(condition: bool, setting: str, value: object, rule: str) -> None:
    """Raise `SettingsError` ("setting=value: rule") unless `condition` holds."""
    if not condition:
        shown = value.name if isinstance(value, Enum) else "null" if value is None else str(value)
        raise SettingsError(f"{setting}={one_line(shown, LONGEST_VALUE)}: {rule}")


@contextmanager
def told_in_one_line(speaks: bool = True) -> Iterator[None]:
    """End the process with the line of a `SettingsError` instead of its traceback.

    Args:
        speaks: whether this process prints the line; of several that raise the same, one does.
    """
    try:
        yield
    except SettingsError as error:
        if speaks:
            tell_error(f"error: {error}")
        sys.exit(EXIT_USER_ERROR)


@contextmanager
def as_tool() -> Iterator[None]:
    """Around all that a tool does whose product is what it prints: mistakes, Ctrl-C and lost output end it in order."""
    protect_streams()
    with told_in_one_line():
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(EXIT_STOPPED)
        if output_was_lost():
            sys.exit(EXIT_FAILURE)


def run_command(module: str) -> None:
    """Import the module of a command, which takes seconds, and call its `main`; Ctrl-C meanwhile ends it in order."""
    protect_streams()
    try:
        importlib.import_module(module).main()
    except KeyboardInterrupt:
        sys.exit(EXIT_STOPPED)
