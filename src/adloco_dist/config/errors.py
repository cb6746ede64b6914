"""How a mistake of the user is told: one line."""

from enum import Enum


class SettingsError(ValueError):
    """A mistake of the user. One line: the setting, its value, what is allowed, what to do."""


def require(condition: bool, setting: str, value: object, rule: str) -> None:
    """Raise `SettingsError` ("setting=value: rule") unless `condition` holds."""
    if not condition:
        shown = value.name if isinstance(value, Enum) else "null" if value is None else value
        raise SettingsError(f"{setting}={shown}: {rule}")
