"""How commands end: a mistake of the user is reported in one line, with exit codes that scripts can use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from adloco_dist.terminal import output_was_lost, protect_streams, report_error
from adloco_dist.text import one_line

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
"""The run was asked to stop before its budget was spent: start it again (sysexits.h, EX_TEMPFAIL)."""
LONGEST_VALUE = 300
"""Characters of a value that are shown."""


class SettingsError(ValueError):
    """A mistake of the user. One line: the setting, its value, what is allowed, what to do."""

    @classmethod
    def of(cls, setting: str, value: object, rule: str) -> "SettingsError":
        """The error that a setting must not have this value: "setting=value: rule"."""
        shown = value.name if isinstance(value, Enum) else "null" if value is None else str(value)
        return cls(f"{setting}={one_line(shown, LONGEST_VALUE)}: {rule}")


@contextmanager
def reported_in_one_line(speaks: bool = True) -> Iterator[None]:
    """End the process with the line of a `SettingsError` instead of its traceback.

    Args:
        speaks: whether this process prints the line; of several that raise the same, one does.
    """
    try:
        yield
    except SettingsError as error:
        if speaks:
            report_error(f"error: {error}")
        sys.exit(EXIT_USER_ERROR)


@contextmanager
def as_tool() -> Iterator[None]:
    """Turn mistakes of the user, Ctrl-C and lost output into exit codes, in a tool whose product is what it prints."""
    protect_streams()
    with reported_in_one_line():
        try:
            yield
        except KeyboardInterrupt:
            sys.exit(EXIT_STOPPED)
        if output_was_lost():
            sys.exit(EXIT_FAILURE)
