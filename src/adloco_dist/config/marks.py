"""What stands in the annotation of a setting: which numbers it may be, and under which other settings it is read."""

import re
from dataclasses import dataclass
from functools import cache
from math import inf
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from adloco_dist.config.errors import require

Mark = TypeVar("Mark")


class Range:
    """The finite numbers that a setting may be, as in Range(">= 1"), Range("> 0 seconds") or Range("in [0, 1)")."""

    def __init__(self, text: str) -> None:
        """The text completes "must be"; words after the numbers are for people."""
        match = re.match(r"(>=?) ([\d.]+)|in ([\[(])([\d.]+), ([\d.]+)([\])])", text)
        assert match, text
        at_least, low, left, smallest, largest, right = match.groups()
        self.text = text
        self._low, self._high = float(low or smallest), float(largest or inf)
        self._has_low, self._has_high = at_least == ">=" or left == "[", right == "]"

    def __contains__(self, value: float) -> bool:
        is_end = (self._has_low and value == self._low) or (self._has_high and value == self._high)
        return is_end or self._low < value < self._high


@dataclass(frozen=True)
class Condition:
    """What one other setting must be."""

    setting: str
    operator: str
    """= (one of the values), != (none of them), or > (more than the only one)."""
    values: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Condition":
        """The condition that is written as "setting=first,second", "setting!=first,second" or "setting>number"."""
        setting, operator, values = re.split(r"(!=|=|>)", text, maxsplit=1)
        return cls(setting, operator, tuple(values.split(",")))

    def holds(self, value: str) -> bool:
        """Whether it does where the setting has this value, as one types it."""
        if self.operator == ">":
            return float(value) > float(self.values[0])
        return (value in self.values) == (self.operator == "=")

    def __str__(self) -> str:
        if self.operator == "!=":
            return " and ".join(f"{self.setting}!={value}" for value in self.values)
        *others, last = self.values
        return f"{self.setting}{self.operator}{', '.join(others)}{' or ' if others else ''}{last}"


class ReadWhen:
    """A setting is read when other settings have certain values, as in ReadWhen("wire.format=sparse"); of several that
    stand at a field, one suffices.

    The conditions are about settings alone. What follows from ranks and data is not looked at: a single worker, for
    example, sends nothing to anybody, whatever `wire` says.
    """

    def __init__(self, *conditions: str) -> None:
        """All conditions must hold; `Condition.of` says how they are written."""
        self.conditions = tuple(Condition.of(condition) for condition in conditions)


ON_A_GPU = "cluster.device!=cpu"
SEVERAL_TRAINERS = "pool.trainers>1"


def marks_of(section: type, kind: type[Mark]) -> dict[str, tuple[Mark, ...]]:
    """What stands of a kind at the settings of a section, by field; those without are missing."""
    hints = get_type_hints(section, include_extras=True)
    held = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    marks = {name: tuple(mark for mark in found if isinstance(mark, kind)) for name, found in held.items()}
    return {name: found for name, found in marks.items() if found}


@cache
def ranges_of(section: type) -> dict[str, tuple[Range, str]]:
    """The ranges of a section's settings and their rules in words, by field; others may be anything of their type."""
    hints = get_type_hints(section)
    or_null = {name: ", or null" if NoneType in get_args(hint) else "" for name, hint in hints.items()}
    return {name: (one, f"must be {one.text}{or_null[name]}") for name, (one,) in marks_of(section, Range).items()}


def check_ranges(name: str, section: Any) -> None:
    """Refuse a number of a section ("": of the top level) that is not in the range of its field, by a SettingsError."""
    for field, (range_, rule) in ranges_of(type(section)).items():
        value = getattr(section, field)
        require(value is None or value in range_, f"{name}.{field}" if name else field, value, rule)
