"""Settings that are a number and its unit in one, as in budget=20rounds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from adloco_dist.config.errors import SettingsError

WHOLE = ("rounds", "tokens")
"""Units that are counted."""


@dataclass(frozen=True)
class Amount:
    """So many of a unit."""

    number: float
    """> 0; an int of `WHOLE` units."""
    unit: str

    @classmethod
    def of(cls, setting: str, text: str, units: Sequence[str]) -> "Amount":
        """The amount that the text of a setting says: 20rounds, 1_200_000tokens, 1.2e6tokens, 1epoch, 5%; raises a
        SettingsError where it is no positive number with one of these units, which are in the plural."""
        match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?) ?([a-z]+|%)", text)
        unit = next((unit for unit in units if match and match[2] in (unit, unit.removesuffix("s"))), None)
        number = float(match[1]) if match else 0.0
        if unit is None or not 0 < number < inf or (unit in WHOLE and not number.is_integer()):
            rule = f"must be a number > 0 ({' and '.join(WHOLE)} are whole) with its unit, {' or '.join(units)}"
            raise SettingsError.of(setting, text, f"{rule}; for example {setting}=20{units[0]}")
        return cls(int(number) if number.is_integer() else number, unit)

    def __str__(self) -> str:
        """As one types it: the same for all spellings of an amount."""
        return f"{self.number:_}{self.unit}"
