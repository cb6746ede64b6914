"""A mistake of the user, in one line, and exit codes that scripts can use."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from adloco_dist.text import one_line, reason

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


def require(condition: bool, setting: str, value: object, rule: str) -> None:
    """Refuse a setting's value unless the condition holds, by a SettingsError."""
    if not condition:
        raise SettingsError.of(setting, value, rule)


@contextmanager
def refused(what: str, rule: str) -> Iterator[None]:
    """Turn an exception of whatever kind, which a library or a user's code raises in the block, into the SettingsError
    "what (the exception's text); rule"."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{what} ({reason(error)}); {rule}") from error
