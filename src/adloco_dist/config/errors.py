"""How a mistake of the user is told, one line, and the exit codes that scripts can use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
"""Asked to stop before the budget was spent: start it again (sysexits.h, EX_TEMPFAIL)."""


class SettingsError(ValueError):
    """A mistake of the user. One line: the setting, its value, what is allowed, what to do."""


def require(condition: bool, setting: str, value: object, rule: str) -> None:
    """Raise `SettingsError` ("setting=value: rule") unless `condition` holds."""
    if not condition:
        shown = value.name if isinstance(value, Enum) else "null" if value is None else value
        raise SettingsError(f"{setting}={shown}: {rule}")


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
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
