"""The runs of experiments/ have settings that exist, and figures are what their records say."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.config.compose import compose
from helpers.commands import ROOT

sys.path.insert(0, str(ROOT / "experiments"))

from figures import Records, over_others, second_machine, seconds_to
from questions import QUESTIONS


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_run_composes_and_has_a_name_of_its_own(question: str) -> None:
    cases = QUESTIONS[question](Path("text.txt"))
    assert len({case.name for case in cases}) == len(cases)
    sides = {case.name.split("/")[1]: case for case in cases}
    for case in sides.values():
        assert case.name.split("/")[0] == question
        settings = compose(case.arguments[2:])
        assert settings.simulation.is_on or question == "sources"


def test_the_time_to_a_loss() -> None:
    line = [(50.0, 2.0), (100.0, 1.5)]
    assert seconds_to(1.75, line) == pytest.approx(50 * math.sqrt(2)), "half way, in log(seconds)"
    assert seconds_to(1.0, line) == pytest.approx(200)
    assert seconds_to(1.9, [*line, (200.0, 1.4)]) == pytest.approx(50 * 2**0.2), "between the budgets beside it"
    assert seconds_to(1.6, [(80.0, 1.5)]) == 80
    assert seconds_to(1.4, [(80.0, 1.5)]) == math.inf
    assert seconds_to(1.4, [(50.0, 1.5), (100.0, 1.5)]) == math.inf


def test_figures_are_ratios_of_times() -> None:
    def record(side: str, seconds: float, loss: float) -> dict[str, Any]:
        return {"name": f"second_machine/{side}/{seconds:g}s/seed1", "budget": seconds, "loss": loss}

    rows = [record("alone", 150, 1.75), record("two_10", 50, 2.0), record("two_10", 100, 1.5),
            record("two_free", 50, 2.0), record("two_100", 60, 1.8)]  # fmt: skip
    records = Records(rows)
    found = second_machine(records)
    assert found["second_machine_10mbit"] == [pytest.approx(50 * math.sqrt(2) / 150)]
    assert found["second_machine_100mbit"] == [math.inf], "its only budget is not enough"
    assert over_others(records, "second_machine", "two_10", {"free": "two_free"}, 50) == {"free": [pytest.approx(1.0)]}
