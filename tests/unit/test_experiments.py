"""The runs of experiments/ have settings that exist, and figures are what their records say."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.config.compose import compose
from helpers.commands import ROOT

sys.path.insert(0, str(ROOT / "experiments"))

from figures import (
    extrapolated_bound,
    merging_at_equal_tokens,
    over_others,
    print_all,
    second_machine,
    second_machine_bounds,
)
from kept import Records, seconds_to
from page import PAGES, page
from questions import QUESTIONS
from ratios import interval, is_extrapolated, ratios
from tables import best_rate


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_run_composes_and_has_a_name_of_its_own(question: str) -> None:
    cases = QUESTIONS[question](Path("text.txt"))
    assert len({case.name for case in cases}) == len(cases)
    sides = {case.name.split("/")[1]: case for case in cases}
    for case in sides.values():
        assert case.name.split("/")[0] == question
        settings = compose(case.arguments[2:])
        assert settings.simulation.is_on or question in ("shapes", "sources"), "at equal tokens"


def test_the_time_to_a_loss() -> None:
    line = [(50.0, 2.0), (100.0, 1.5)]
    assert seconds_to(1.75, line) == pytest.approx(50 * math.sqrt(2)), "half way, in log(seconds)"
    assert seconds_to(1.0, line) == pytest.approx(200)
    assert seconds_to(1.9, [*line, (200.0, 1.4)]) == pytest.approx(50 * 2**0.2), "between the budgets beside it"
    assert seconds_to(1.6, [(80.0, 1.5)]) == 80
    assert seconds_to(1.4, [(80.0, 1.5)]) == math.inf
    assert seconds_to(1.4, [(50.0, 1.5), (100.0, 1.5)]) == math.inf


def test_the_best_rate_is_where_a_parabola_is_least() -> None:
    def loss(rate: float) -> float:
        return 1.5 + 0.1 * math.log(rate / 3e-3) ** 2

    assert best_rate({rate: loss(rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3)}) == pytest.approx(3e-3)
    assert best_rate({rate: loss(rate) for rate in (4e-3, 8e-3)}) is None, "it may be below"


def test_figures_are_ratios_of_times() -> None:
    def record(side: str, seconds: float, loss: float) -> dict[str, Any]:
        return {"name": f"second_machine/{side}/{seconds:g}s/seed1", "budget": seconds, "loss": loss}

    rows = [record("alone", 150, 1.75), record("two_10", 50, 2.0), record("two_10", 100, 1.5),
            record("two_free", 50, 2.0), record("two_100", 60, 1.8)]  # fmt: skip
    records = Records(rows)
    found = second_machine(records)
    assert found["second_machine_10mbit_adamw"] == [pytest.approx(50 * math.sqrt(2) / 150)]
    assert found["second_machine_100mbit_adamw"] == [math.inf], "its only budget is not enough"
    assert over_others(records, "second_machine", "two_10", {"free": "two_free"}, 50) == {"free": [pytest.approx(1.0)]}


def test_what_is_extrapolated_has_a_bound() -> None:
    line = [(50.0, 2.0), (100.0, 1.5)]
    assert extrapolated_bound(1.75, line) is None, "between two budgets"
    assert extrapolated_bound(2.2, line) == 50, "the shorter budget had a lower loss"
    assert extrapolated_bound(1.4, line) is None, "beyond the longer one there is no upper bound"

    def record(side: str, seconds: float, loss: float) -> dict[str, Any]:
        return {"name": f"second_machine/{side}/{seconds:g}s/seed2", "budget": seconds, "loss": loss}

    records = Records([record("alone", 150, 1.75), record("two_10", 50, 2.0), record("two_10", 100, 1.5),
                       record("four_100", 45, 1.7), record("four_100", 60, 1.6)])  # fmt: skip
    assert second_machine_bounds(records, "second_machine", "") == {"four_machines_100mbit_adamw": [pytest.approx(0.3)]}


def test_pools_that_merge_are_compared_at_equal_tokens() -> None:
    def record(side: str, seconds: float, tokens: int, loss: float) -> dict[str, Any]:
        return {"name": f"merging/{side}/{seconds:g}s/seed0", "budget": seconds, "tokens": tokens, "loss": loss}

    records = Records([record("one_trainer", 30, 1000, 2.0), record("one_trainer", 45, 4000, 1.6),
                       record("merged_late", 45, 1000, 1.8)])  # fmt: skip
    assert merging_at_equal_tokens(records) == {"merged_late": [pytest.approx(0.5)]}, "half of the 2,000 tokens"


def test_ratios_are_of_times_to_the_other_side_s_last_loss() -> None:
    def record(side: str, seed: int, curve: list[tuple[float, float]]) -> dict[str, Any]:
        return {"name": f"machines/{side}/{curve[-1][0]:g}s/seed{seed}", "budget": curve[-1][0], "curve": curve}

    alone, two = [(75.0, 2.0), (150.0, 1.5)], [(50.0, 1.6), (100.0, 1.4)]
    rows = [record("default_alone", 10, alone), record("two_10", 10, two), record("default_alone", 11, alone)]
    expected = {"second_machine_10mbit": [pytest.approx(50 * math.sqrt(2) / 150)]}
    assert ratios(Records(rows)) == expected, "in log(seconds); of seed 11 there is no other side"
    assert interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484", "Student's t with two degrees of freedom is 4.303"
    assert interval([0.5]) == "0.500"
    assert not is_extrapolated(two, alone)
    assert is_extrapolated(two, [(150.0, 1.3)]), "which it has not come to"
    assert is_extrapolated(two, [(150.0, 1.7)]), "which it had before it was first looked at"


def test_every_record_is_of_a_run_that_a_question_makes() -> None:
    made = {case.name for question in QUESTIONS.values() for case in question(Path("text.txt"))}
    others = {name for name in Records.kept().by_name if not name.startswith("compressed/")} - made
    assert others == set()


@pytest.mark.parametrize("template", PAGES)
def test_pages_are_what_the_records_say(template: str) -> None:
    assert PAGES[template].read_text(encoding="utf-8") == page(template, Records.kept()), (
        "run python experiments/page.py"
    )


def test_the_page_of_evidence_has_the_figures_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every mean with its range, except torchft's, whose runs on real hosts are in no record."""
    print_all(Records.kept())
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    before, _, rest = page.partition("| torchft |")
    after = rest.partition("\n\n")[2]
    figures = re.findall(r"(\d\.\d{3})\*{0,2} \((\d\.\d{3}) to (\d\.\d{3})\)", before + after)
    assert len(figures) > 50
    missing = {f"{mean} ({least} to {most}" for mean, least, most in figures} - set(
        re.findall(r"\d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}", printed)
    )
    assert missing == set()
