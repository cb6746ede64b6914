"""Settings in a file that somebody else wrote are text: nothing in them reads this machine, or is computed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose, from_plain, to_plain, to_yaml
from adloco_dist.report.source import read_source
from adloco_dist.report.write import page, write_page
from adloco_dist.run.reading import read_run, settings_of
from helpers.run_directories import before_training, result, row, run_directory

pytestmark = pytest.mark.stranger
SECRET = "hunter2"
TEXTS = (
    "${oc.env:MY_SECRET}", "before ${oc.env:MY_SECRET} after", "${oc.env:MY_SECRET,fallback}", "\\${oc.env:MY_SECRET}",
    "\\\\${oc.env:MY_SECRET}", "${oc.decode:${oc.env:MY_SECRET}}", "${oc.env:${oc.env:MY_NAME}}", "${seed}", "${.name}",
    "${oc.dict.keys:pool}", "${hydra:runtime.cwd}", "${now:%Y}", "${", "${nowhere", "$${seed}", "${seed}\\",
)  # fmt: skip


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("MY_NAME", "MY_SECRET")


def foreign(text: str) -> dict[str, Any]:
    """Settings that have this text wherever they may have any."""
    plain = to_plain(Settings())
    plain["run"] |= {"root": text, "directory": text}
    plain["tracking"] |= {"group": text}
    plain["data"] |= {"corpus": "text", "train": [text], "tokenizer": text}
    plain["model"] |= {"warm_start": text, "overrides": {"hidden_act": text, "nested": {"deeper": [text]}}}
    return plain


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_as_it_stands(text: str) -> None:
    plain = foreign(text)
    assert to_plain(from_plain(plain)) == plain


def test_any_text_is_read_as_it_stands() -> None:
    texts = ["".join(parts) for parts in itertools.product("\\${a}", repeat=5)]
    plain = to_plain(Settings())
    plain["model"]["overrides"] = {str(number): text for number, text in enumerate(texts)}
    assert from_plain(plain).model.overrides == plain["model"]["overrides"]


@pytest.mark.parametrize("text", TEXTS[:3])
def test_pages_and_settings_of_a_foreign_run_do_not_have_what_this_machine_knows(tmp_path: Path, text: str) -> None:
    rows = [*before_training(0), row(1), row(2)]
    directory = run_directory(tmp_path / "run", rows, ends=result(), facts={"settings": foreign(text)})
    assert settings_of(directory, read_run(directory)).run.root == text
    source = read_source(directory)
    for sources, name in (([source], "one"), ([source, source], "several")):
        written = write_page(page(sources), tmp_path / name)
        assert SECRET not in written.read_text(encoding="utf-8")


@pytest.mark.parametrize("field", ["seed", "inner.lr", "batching.request", "tf32", "data.train"])
def test_an_interpolation_where_no_text_may_be_is_refused(tmp_path: Path, field: str) -> None:
    """It is not what any run writes."""
    plain = to_plain(Settings())
    section, _, name = field.rpartition(".")
    (plain[section] if section else plain)[name] = "${oc.decode:${oc.env:MY_NUMBER,1}}"
    directory = run_directory(tmp_path / "run", [], facts={"settings": plain})
    with pytest.raises(SettingsError, match="cannot be read") as refused:
        settings_of(directory, read_run(directory))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", TEXTS)
def test_own_settings_are_printed_as_they_are(text: str) -> None:
    settings = from_plain(foreign(text))
    assert yaml.safe_load(to_yaml(settings)) == to_plain(settings)


def test_what_one_types_is_still_resolved() -> None:
    """The command line is one's own."""
    assert compose(["tracking.group=${oc.env:MY_SECRET}"]).tracking.group == SECRET
    assert compose([r"tracking.group='\${oc.env:MY_SECRET}'"]).tracking.group == "${oc.env:MY_SECRET}"
