"""Settings that an earlier release had are refused, wherever they come from, with what to do instead."""

import re

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose, from_plain
from adloco_dist.config.gone import GONE
from adloco_dist.config.settings import setting_names

KEYS = set(setting_names())


@pytest.mark.parametrize(("name", "remedy"), GONE.items())
def test_a_setting_that_is_gone_is_refused_with_what_to_do(name: str, remedy: str) -> None:
    line = name if "=" in name else f"{name}=3"
    key, _, value = line.partition("=")
    assert "=" in name or key not in KEYS
    refused = re.escape(f"{line}: is gone since this release; {remedy}")
    with pytest.raises(SettingsError, match=f"^{refused}$"):
        compose([line])
    section, dot, field = key.partition(".")
    if dot:  # else a group, which no record names
        with pytest.raises(SettingsError, match=f"^{refused}$"):
            from_plain({section: {field: value}})


@pytest.mark.parametrize("remedy", sorted(set(GONE.values())))
def test_a_remedy_names_settings_that_exist_or_says_what_is_always_so(remedy: str) -> None:
    assert {name for name in re.findall(r"[a-z_]+\.[a-z_]+", remedy)} <= KEYS
    named = [key for key in KEYS if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", remedy)]
    assert named or "always" in remedy
    for key, value in re.findall(r"([a-z_.]+)=([^\s,;]+)", remedy):
        compose([f"{key}={value}"])
