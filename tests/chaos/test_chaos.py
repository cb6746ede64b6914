"""Whether runs outlive what befalls them; asked for by `-m chaos`, with how much of it in the environment.

`python bench/survive.py` runs it part by part, and prints the figures.
"""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.churn import measure_churn
from chaos.configs import measure_configs
from chaos.damage import measure_damage
from chaos.kills import measure_kills
from chaos.nodes import cut_links, lose_hosts
from chaos.rim import Tally, all_cases, in_words, make_template, try_case
from chaos.rim_case import Case

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("CHAOS_SEED", "0"))
"""Of what is random."""
FIGURES = os.environ.get("CHAOS_FIGURES")
"""The file that figures are written to."""


def count(default: int) -> int:
    """Of command lines, kills, damages, cuts or cases."""
    return int(os.environ.get("CHAOS_COUNT", default))


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    yield found
    if FIGURES:
        Path(FIGURES).write_text(json.dumps(found), encoding="utf-8")


def test_damage(figures: dict[str, float]) -> None:
    figures |= measure_damage(count(200))
    assert figures["damage_missed"] == 0


def test_configs(figures: dict[str, float]) -> None:
    figures |= measure_configs(count(500), SEED)
    assert figures["configs_failed"] == 0


def test_kills(figures: dict[str, float]) -> None:
    figures |= measure_kills(count(50), SEED)
    assert figures["kills_lost"] == 0


@pytest.mark.needs("hosts")
def test_nodes(figures: dict[str, float]) -> None:
    figures |= lose_hosts(count(2))
    assert figures["node_rounds_lost"] == 0


@pytest.mark.needs("hosts")
def test_churn(figures: dict[str, float]) -> None:
    figures |= measure_churn(count(20), SEED)
    assert figures["churn_wrong"] == 0


@pytest.mark.needs("hosts")
def test_links(figures: dict[str, float]) -> None:
    figures |= cut_links(count(20))
    assert figures["links_cut_returned"] == figures["links_cut"]


def chosen_cases() -> list[Case]:
    cases = [case for case in all_cases() if os.environ.get("CHAOS_CASE", "") in case.name]
    asked = count(len(cases))
    return random.Random(SEED).sample(cases, asked) if asked < len(cases) else cases


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    make_template(folder)
    return folder


@pytest.fixture(scope="module")
def tally(figures: dict[str, float]) -> Iterator[Tally]:
    kept = Tally()
    yield kept
    figures |= kept.figures()


@pytest.mark.parametrize("case", chosen_cases(), ids=lambda case: case.name)
def test_rim(case: Case, template: Path, tally: Tally, tmp_path: Path) -> None:
    problems, running = try_case(case, template, tmp_path / "case")
    tally.add(case, problems, running)
    subprocess.run(["chmod", "-R", "u+w", tmp_path / "case"], check=False)
    shutil.rmtree(tmp_path / "case")
    assert not problems, in_words(problems, running)
