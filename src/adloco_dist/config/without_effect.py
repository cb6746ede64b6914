"""Settings that were given and cannot have an effect beside the others: a run names them, a sweep refuses them."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from adloco_dist.config import Settings
from adloco_dist.config.compose import CONFIG_MODULE, GROUPS, flatten, parse, to_plain
from adloco_dist.config.read_when import ReadWhen, alternatives_of, in_words

OF_MANY_SECTIONS = ("algorithm", "experiment")
"""Groups whose choices set what belongs to other sections, too: there is always something that is read."""


def without_effect(settings: Settings, overrides: Sequence[str]) -> dict[str, str]:
    """Why overrides are read by nobody, by the override as it was typed; those that are read are missing.

    A group counts where nothing is read of what its choice sets; what an experiment sets was not given.

    Args:
        settings: what the overrides came to.
        overrides: valid ones, which name one value each.
    """
    shown = {key: _shown(value) for key, value in flatten(to_plain(settings)).items()}
    found = {}
    for override in parse(overrides):
        key = override.key_or_group
        given = _settings_of(key, override.get_value_string()) if key in GROUPS else (key,)
        reasons = [_why_unread(one, shown) for one in given]
        if reasons and all(reasons):
            found[override.input_line or key] = str(reasons[0])
    return found


@cache
def alternatives_by_setting() -> dict[str, tuple[ReadWhen, ...]]:
    """When settings are read, by dotted name; those that are always read are missing."""
    return dict(_walked(Settings()))


def _walked(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[ReadWhen, ...]]]:
    for name, alternatives in alternatives_of(type(section)).items():
        yield prefix + name, alternatives
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _walked(value, f"{prefix}{field.name}.")


def _why_unread(setting: str, shown: dict[str, str]) -> str | None:
    """The settings because of which one is not read, and when it is; None: it is read."""
    alternatives = alternatives_by_setting().get(setting, ())
    unmet = [
        [condition.setting for condition in alternative.conditions if not condition.holds(shown[condition.setting])]
        for alternative in alternatives
    ]
    if not all(unmet) or not unmet:
        return None
    because = " and ".join(dict.fromkeys(f"{one}={shown[one]}" for each in unmet for one in each))
    return f"has no effect with {because}; it is read {in_words(alternatives)}"


@cache
def _settings_of(group: str, choice: str) -> tuple[str, ...]:
    """What a choice of a group sets, by dotted name; nothing for groups that set something of every kind."""
    if group in OF_MANY_SECTIONS:
        return ()
    content = OmegaConf.create(files(CONFIG_MODULE).joinpath(group, f"{choice}.yaml").read_text(encoding="utf-8"))
    return tuple(f"{group}.{name}" for name in content)


def _shown(value: Any) -> str:
    """A plain value as one types it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)
