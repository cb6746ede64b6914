"""Settings from Hydra's config groups and the command line; DictConfig ends here."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adloco_dist.config import Settings, SettingsError

CONFIG_MODULE = "adloco_dist.conf"
GROUPS = ("model", "data", "algorithm", "inner", "outer", "budget", "evaluation", "tracking", "experiment")


def compose(overrides: Sequence[str]) -> Settings:
    """The settings of conf/train.yaml with `overrides` as a user types them.

    Raises:
        SettingsError: one line for a wrong key, type, choice or value.
    """
    ConfigStore.instance().store(name="settings", node=Settings)
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for override in parsed:
            _check_key(override.key_or_group, str(override.input_line))
            if override.is_sweep_override():
                raise SettingsError(f"{override.input_line}: names several values; give one")
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra_compose("train", list(overrides))
        settings = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingsError(_one_line(error)) from error
    assert isinstance(settings, Settings)
    return settings


def to_plain(settings: Settings) -> dict[str, Any]:
    """Nested plain values, enums by name, for JSON."""
    plain = OmegaConf.to_container(OmegaConf.structured(settings), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def from_plain(plain: dict[str, Any]) -> Settings:
    """The settings that `to_plain` was given."""
    settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), plain))
    assert isinstance(settings, Settings)
    return settings


def to_yaml(settings: Settings) -> str:
    return OmegaConf.to_yaml(DictConfig(to_plain(settings)))


def flatten(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _check_key(key: str, line: str) -> None:
    """Refuse a key or group that does not exist, with the nearest that do."""
    keys = set(_keys(Settings()))
    sections = {key.split(".")[0] for key in keys if "." in key}
    if key in keys | set(GROUPS) or key.startswith("model.overrides.") or key.startswith("hydra."):
        return
    if key in sections:
        raise SettingsError(f"{line}: {key} is a section; set one of its keys, for example {_example(key, keys)}")
    near = difflib.get_close_matches(key, [*keys, *GROUPS], n=3) or _same_name(key, keys)
    hint = f"did you mean {' or '.join(near)}?" if near else "--print-config lists all settings"
    raise SettingsError(f"{line}: no such setting; {hint}")


def _keys(section: Any, prefix: str = "") -> Iterable[str]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _same_name(key: str, keys: set[str]) -> list[str]:
    """Settings of that name in any section: `lr` finds inner.lr and outer.lr."""
    name = key.split(".")[-1]
    return sorted(known for known in keys if known.split(".")[-1] == name)


def _example(section: str, keys: set[str]) -> str:
    return min(key for key in keys if key.startswith(section + "."))


def _one_line(error: Exception) -> str:
    """What Hydra or OmegaConf say in several lines, as "key: message"; a choice lists what is allowed."""
    text = str(error)
    while error.__cause__ is not None and "\n" not in text:
        error = error.__cause__  # pyright: ignore[reportAssignmentType]
        text = str(error)
    found = re.search(r"full_key: (\S+)", text)
    message = " ".join(line.strip() for line in text.splitlines() if ":" not in line[:20] or line[0] != " ")
    message = re.sub(r"\s*full_key: \S+.*", "", message)
    return f"{found[1]}: {message}" if found and found[1] not in message else message


def enum_choices(enum: type[Enum]) -> str:
    return ", ".join(member.name for member in enum)
