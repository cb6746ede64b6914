"""Under which other settings a setting is read; this stands in the annotation of its field."""

import re
from dataclasses import dataclass
from typing import get_type_hints


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
    """A setting is read when other settings have certain values; of several that stand at a field, one suffices.

    eta: Annotated[float, ReadWhen("batching.request=norm_test,inner_product_test")] = 0.8

    The conditions are about settings alone. What follows from ranks and data is not looked at: a single worker, for
    example, sends nothing to anybody, whatever `wire` says.
    """

    def __init__(self, *conditions: str) -> None:
        """
        Args:
            conditions: all of them must hold; `Condition.of` says how they are written.
        """
        self.conditions = tuple(Condition.of(condition) for condition in conditions)

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))


def alternatives_of(section: type) -> dict[str, tuple[ReadWhen, ...]]:
    """When the settings of a section are read, by field; those that are always read are missing."""
    hints = get_type_hints(section, include_extras=True)
    noted = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: alternatives for name, alternatives in noted.items() if alternatives}


def in_words(alternatives: tuple[ReadWhen, ...]) -> str:
    """Say when a setting is read: "when a=b, or when c=d"."""
    return ", or ".join(f"when {alternative}" for alternative in alternatives)


ON_A_GPU = "cluster.device!=cpu"
SEVERAL_TRAINERS = "pool.trainers>1"
