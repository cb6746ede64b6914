"""Settings that were given and cannot have an effect beside the others: a run names them, a sweep refuses them."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from omegaconf import OmegaConf

from adloco_dist.config import Settings
from adloco_dist.config.compose import CONFIG_MODULE, GROUPS, as_typed, flatten, parse, to_plain
from adloco_dist.config.marks import ReadWhen, marks_of
from adloco_dist.config.settings import sections

ALWAYS_READ = ("algorithm", "experiment", "model")
"""Groups of which some setting is always read."""


def without_effect(settings: Settings, overrides: Sequence[str]) -> dict[str, str]:
    """Why overrides are read by nobody, by the override as it was typed; those that are read are missing.

    A group counts where nothing is read of what its choices set; what an experiment sets was not given. The overrides
    are valid, name one value each, and came to `settings`.
    """
    shown = {key: as_typed(value) for key, value in flatten(to_plain(settings)).items()}
    found = {}
    for override in parse(overrides):
        key = override.key_or_group
        given = _settings_of(key) if key in GROUPS else (key,)
        reasons = [_why_unread(one, shown) for one in given]
        if reasons and all(reasons):
            found[override.input_line or key] = str(reasons[0])
    return found


@cache
def alternatives_by_setting() -> dict[str, tuple[ReadWhen, ...]]:
    """When settings are read, by dotted name; those that are always read are missing."""
    return {
        f"{name}.{field}".removeprefix("."): alternatives
        for name, section in sections(Settings()).items()
        for field, alternatives in marks_of(type(section), ReadWhen).items()
    }


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
    ways = ", or ".join(f"when {' and '.join(map(str, way.conditions))}" for way in alternatives)
    return f"has no effect with {because}; it is read {ways}"


@cache
def _settings_of(group: str) -> tuple[str, ...]:
    """What the choices of a group set, by dotted name; nothing for groups that always have an effect."""
    if group in ALWAYS_READ:
        return ()
    folder = files(CONFIG_MODULE).joinpath(group)
    choices = [OmegaConf.create(file.read_text(encoding="utf-8")) for file in folder.iterdir()]
    return tuple(dict.fromkeys(f"{group}.{name}" for choice in choices for name in choice))
