"""Names that settings had in an earlier release are refused with the new ones, wherever they come from."""

import pytest

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose, flatten, from_plain, to_plain
from adloco_dist.config.renamed import RENAMED


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    line = old if "=" in old else f"{old}=3"
    with pytest.raises(SettingsError, match=rf"^{line}: has been renamed; set {new}$"):
        compose([line])
    key, _, value = line.partition("=")
    section, name = key.split(".")
    with pytest.raises(SettingsError, match=rf"^{line}: has been renamed; set {new}$"):
        from_plain({section: {name: value}})


def test_new_names_are_settings_and_old_ones_are_not() -> None:
    keys = flatten(to_plain(Settings())).keys()
    assert {new.partition("=")[0] for new in RENAMED.values()} <= keys
    assert {old for old in RENAMED if "=" not in old}.isdisjoint(keys)
    assert compose(["run.unfinished=archive"]).run.unfinished.name == "archive"
