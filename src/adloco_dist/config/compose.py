"""Settings from Hydra's config groups and the command line; DictConfig ends here."""

import difflib
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adloco_dist.config import ModelSettings, Settings, SettingsError, require
from adloco_dist.config.gone import refuse_gone
from adloco_dist.config.paths import check_lengths, to_type, with_quoted_paths
from adloco_dist.config.settings import setting_names
from adloco_dist.messages import encode

CONFIG_MODULE = "adloco_dist.conf"
GROUPS = ("model", "data", "algorithm", "inner", "outer", "wire", "merge", "tracking", "experiment")


def compose(overrides: Sequence[str]) -> Settings:
    """The settings with `overrides` as a user types them; raises a SettingsError for what is wrong with one of them."""
    store_schema()
    try:
        parsed = parse(overrides)
        for override in parsed:
            if override.is_sweep_override():
                detail = f"{override.input_line}: names several values; give one, or sweep over them with -m"
                line = to_type(override.input_line or "")
                hint = f"; if the comma belongs to a path or parts a list, type {line}" if line else ""
                raise SettingsError(detail + hint)
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra_compose("train", [override.input_line or "" for override in parsed])
        _check_sizes(config)
        settings: Any = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingsError(explain(error)) from error
    flat = flatten(to_plain(settings))
    check_lengths(flat)
    for key, value in flat.items():  # run.json could not hold it
        is_finite = not isinstance(value, float) or math.isfinite(value)
        require(is_finite, key, value, "must be a finite number; write null where there may be no limit")
    return settings


@cache
def store_schema() -> None:
    """Let Hydra know types and defaults; it merges mappings, so the default of `model.overrides` is a choice."""
    ConfigStore.instance().store(name="settings", node=_schema())
    ConfigStore.instance().store(group="model", name="tiny", node={"overrides": ModelSettings().overrides})


@cache
def _schema() -> DictConfig:
    """The types and defaults of the settings, without fields of a model, which whatever is merged onto it has whole;
    nobody changes it."""
    schema = OmegaConf.structured(Settings)
    schema.model.overrides = {}
    return schema


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them, of settings that exist; some may name several values. Paths need no quotes. Raises
    a SettingsError for what cannot be read, and for a key or group that does not exist."""
    for override in overrides:
        if not override.isascii() and override != override.encode(errors="ignore").decode():
            rule = "has bytes that are no text in this locale, and records could not hold them"
            raise SettingsError(f"{override}: {rule}; name it otherwise, or set a UTF-8 locale")
    try:
        quoted = [with_quoted_paths(override) for override in overrides]
        parsed = OverridesParser.create().parse_overrides(quoted)
    except HydraException as error:
        raise SettingsError(explain(error)) from error
    for override in parsed:
        key, line = override.key_or_group, override.input_line or ""
        if not override.is_delete():
            refuse_gone(key, override.get_value_string())
        _check_key(key, line)
        if override.is_delete():
            raise SettingsError(f"{line}: a setting cannot be removed; set it to another value")
        if key in GROUPS and not override.is_sweep_override() and not isinstance(override.value(), str):
            raise SettingsError(f"{line}: names none of the group's choices; --help lists the groups")
    return parsed


def to_plain(settings: Settings) -> dict[str, Any]:
    """Nested plain values, enums by name, for JSON."""
    return encode(settings)


def from_plain(plain: dict[str, Any]) -> Settings:
    """The settings that `to_plain` was given, by whoever wrote the file that they were read from: text stays text;
    raises a SettingsError where they hold a setting that is gone since."""
    for key, value in flatten(plain).items():
        refuse_gone(key, value)
    settings: Any = OmegaConf.to_object(OmegaConf.merge(_schema(), _without_interpolation(plain)))
    return settings


def to_yaml(settings: Settings) -> str:
    """All settings, as --print-config shows them."""
    return OmegaConf.to_yaml(DictConfig(_without_interpolation(to_plain(settings))), resolve=True)


def _without_interpolation(value: Any) -> Any:
    """Plain values that OmegaConf resolves to `value`: of ${oc.env:HOME} it would read this machine's environment."""
    if isinstance(value, dict):
        return {key: _without_interpolation(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_interpolation(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def flatten(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def as_typed(value: Any) -> str:
    """A plain value as one types it."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return f"[{','.join(map(as_typed, value))}]" if isinstance(value, list) else str(value)


def _check_key(key: str, line: str) -> None:
    """Refuse a key or group that does not exist, with the nearest that do."""
    keys = set(setting_names())
    sections = {key.split(".")[0] for key in keys if "." in key}
    if key in keys | set(GROUPS) or key.startswith("model.overrides.") or key.startswith(("hydra.", "hydra/")):
        return
    if key in sections:
        inside = " or ".join(sorted(name for name in keys if name.startswith(f"{key}.")))
        raise SettingsError(f"{line}: {key} is a section; set {inside}")
    of_that_name = sorted(known for known in keys if known.split(".")[-1] == key.split(".")[-1])  # lr finds inner.lr
    near = difflib.get_close_matches(key, [*keys, *GROUPS], n=3) or of_that_name
    hint = f"did you mean {' or '.join(near)}?" if near else "--print-config lists all settings"
    raise SettingsError(f"{line}: no such setting; {hint}")


def _check_sizes(config: DictConfig) -> None:
    """Refuse whole numbers that fit neither a float nor a tensor."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for key, value in flatten(plain).items():
        for number in value if isinstance(value, list) else [value]:
            is_possible = not isinstance(number, int) or abs(number) < 2**64
            require(is_possible, key, number, "must be below 2**64")


def explain(error: Exception) -> str:
    """Turn a message of Hydra or OmegaConf, of several lines and exceptions, into "what was typed: what is wrong"."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice}: no such choice; {group} is one of {', '.join(error.options)}"
    first_line = str(error).splitlines()[0]
    if isinstance(error, OverrideParseException):
        if line := to_type(str(error.override)):
            return f"{error.override}: names nothing that is there; if it is meant as it stands, type {line}"
        return f"{error.override}: cannot be read ({first_line}); quote it if the shell takes it apart"
    typed = first_line.removeprefix("Error merging override ").rstrip(".")
    hint = f"; type {line}" if (line := to_type(typed)) else ""
    if "is not a ListConfig" in str(error.__cause__):
        return f"{typed}: must be a list{hint or '; write it as [first,second]'}"
    return f"{typed}: {str(error.__cause__).splitlines()[0]}{hint}" if error.__cause__ else typed
