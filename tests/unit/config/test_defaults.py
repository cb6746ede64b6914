"""Every default has one owner, the field of its dataclass: conf/ holds what differs from it, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from adloco_dist.config import Settings
from adloco_dist.config.compose import GROUPS, compose, flatten, to_plain
from helpers.commands import ROOT

DEFAULTS = to_plain(Settings())
OWN_VALUES = [file for group in GROUPS if group != "experiment" for file in (ROOT / "conf" / group).glob("*.yaml")]
"""Presets of experiments repeat defaults on purpose: what reproduces a source does not follow a new default."""


def values(file: Path) -> dict[str, Any]:
    """What a choice of a group sets, by dotted name."""
    text = file.read_text(encoding="utf-8")
    content: Any = OmegaConf.to_container(OmegaConf.create(text))  # Hydra's numbers: 3e-4 is one
    content.pop("defaults", None)
    sections = content if "@package _global_" in text else {file.parent.name: content}
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def test_a_run_without_settings_has_the_defaults() -> None:
    assert compose([]) == Settings()


@pytest.mark.parametrize("file", OWN_VALUES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_a_choice_holds_only_what_differs_from_the_defaults(file: Path) -> None:
    for setting, value in values(file).items():
        section, name = setting.split(".")
        assert value != DEFAULTS[section][name], setting


@pytest.mark.parametrize(
    "choices",
    [
        ["algorithm=adloco"],
        ["model=tiny", "data=python_stdlib", "inner=muon", "outer=average", "wire=adaptive"],
        ["merge=worst_with_worst", "tracking=auto"],
    ],
)
def test_the_choices_that_are_the_defaults_change_nothing(choices: list[str]) -> None:
    assert compose(choices) == Settings()
    assert compose(["experiment=two_by_two", *choices]).pool.trainers == 2


def test_a_named_default_takes_the_place_of_what_an_algorithm_sets() -> None:
    average, plain = compose(["algorithm=diloco", "outer=average"]), Settings()
    assert (average.outer.lr, average.outer.momentum) == (plain.outer.lr, plain.outer.momentum)
    assert compose(["algorithm=diloco", "inner=sgd"]).inner.lr == compose(["inner=sgd"]).inner.lr != plain.inner.lr
    assert compose(["algorithm=diloco", "model=nano"]).model.overrides == compose(["model=nano"]).model.overrides


def test_diloco_is_as_published_and_localsgd_the_same_with_plain_averages() -> None:
    diloco, local = compose(["algorithm=diloco"]), compose(["algorithm=localsgd"])
    assert (diloco.outer.lr, diloco.outer.momentum, diloco.outer.average_span) == (0.7, 0.9, None)
    assert (diloco.batching.request.name, diloco.algorithm.round.name) == ("none", "updates")
    assert (diloco.inner.optimizer.name, diloco.inner.schedule.name) == ("adamw", "cosine")
    assert (diloco.wire.format.name, diloco.wire.fragments, diloco.wire.delay_updates) == ("fp32", 1, 0)
    one, other = flatten(to_plain(diloco)), flatten(to_plain(local))
    assert {key for key in one if one[key] != other[key]} <= {"outer.lr", "outer.momentum"}
    assert (local.outer.lr, local.outer.momentum) == (1.0, 0.0)
