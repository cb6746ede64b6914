"""What the page of a run says and draws, of records made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.report.one import page_of
from adloco_dist.report.page import Page
from adloco_dist.report.source import read_source
from helpers.run_directories import before_training, result, row, run_directory

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>&{{ 7 * 7 }}"
MERGE = {
    "survivor": 1,
    "shares": {"0": 0.25, "1": 0.75},
    "candidates": {member: {"request": 8.0, "bounded": 8.0} for member in "01"},
    "policy": "worst_with_worst",
    "member_losses": {"0": 3.9, "1": 3.7},
    "loss": 3.65,
}


def page(path: Path, rows: list[dict[str, Any]], **named: Any) -> Page:
    return page_of(read_source(run_directory(path / "run", rows, **named)))


def figures(shown: Page) -> list[str]:
    return [figure.name for figure in shown.figures]


def test_one_trainer_that_ended(tmp_path: Path) -> None:
    rows = [*before_training(0), *(row(number) for number in range(1, 4))]
    rows[-1]["validation_loss"] = 3.6
    shown = page(tmp_path, rows, ends=result())
    assert shown.subtitle.startswith("ended: budget=3rounds reached")
    assert "There was one trainer, so nothing to merge." in shown.sentences
    assert shown.sentences[0].startswith("3 rounds in 30 s: 3,000 tokens, 12 updates of each worker; 1 trainer with 1 ")
    (went,) = [one for one in shown.sentences if one.startswith("The validation loss of the best trainer")]
    assert went.startswith(
        "The validation loss of the best trainer went from 5.0000 to 3.6000 while training, on up to "
    )
    (batches,) = [one for one in shown.sentences if one.startswith("Batches")]
    assert batches.startswith("Batches stayed at 8: ")
    assert batches.endswith(
        "asked for 6 at first and 6 at last, and the minimum (batching.min_batch) decided in 3 of 3 rounds."
    )
    (estimate,) = [one for one in shown.sentences if "progress per second" in one]
    assert estimate.startswith("Estimate: 1 worker of a trainer made up to 1.50 times the progress per second of one")
    assert estimate.endswith("the median of the last quarter of the rounds: 1.50 to 1.50).")
    expected = {"loss", "batch", "bounds", "phases", "utilisation", "bytes", "transfer", "resent_packets"}
    assert expected <= set(figures(shown))
    phases = next(figure for figure in shown.figures if figure.name == "phases")
    seconds = {point["series"]: point["seconds"] for point in phases.points}
    assert seconds == {
        "updates": 24,
        "averages": 3,
        "waiting for averages": 1.5,
        "waiting for ranks": 1.5,
        "hidden averages": 9,
    }


def test_what_was_saved_stands_beside_the_losses_while_training(tmp_path: Path) -> None:
    rows = [*before_training(0), *(row(number, learning_rate=1e-3 * number) for number in (1, 2))]
    rows[1]["statistics"], rows[2]["statistics"] = {"squared_norm": 4.0}, {"squared_norm": -0.5}
    facts = {"parameters": 1234, "command": "train.py seed=1"}
    ends = result(3.5) | {"validation_targets": 512, "sample": ["def main(", "):\n    pass"]}
    shown = page(tmp_path, rows, ends=ends, facts=facts)
    drawn = {figure.name: figure for figure in shown.figures}
    assert [point for point in drawn["loss"].points if "saved" in point] == [
        {"saved": "trainer 0", "round": 2, "updates": 8, "tokens": 2000, "bytes": 4_001_000, "seconds": 20, "loss": 3.5}
    ]
    saved = "Saved: trainer 0; validation loss 3.5000, on up to 256 validation sequences (512 targets)."
    assert saved in shown.sentences
    assert [point["rate"] for point in drawn["learning_rate"].points] == [1e-3, 2e-3]
    assert [point["norm"] for point in drawn["gradient_norm"].points] == [2], "of the other nothing but noise was seen"
    assert [point["tokens / s"] for point in drawn["throughput"].points] == [100, 100]
    tiles = dict(shown.tiles)
    assert (
        tiles["validation loss"] == "3.5000" and tiles["parameters"] == "1,234" and tiles["tokens per second"] == "100"
    )
    tables = {table.title: table.rows for section in shown.sections for table in section.tables}
    assert tables["A sample"] == [["def main(", "):\n    pass"]]
    assert ("command", "train.py seed=1") in tables["Command and versions"]


def test_a_run_that_goes_on_is_told_in_the_present(tmp_path: Path) -> None:
    shown = page(tmp_path, [*before_training(0), row(1), row(2, validation_loss=3.6)]).sentences
    assert shown[0].endswith("1 trainer with 1 worker now.")
    told = " ".join(shown)
    assert "There is one trainer, so nothing to merge." in told
    assert "The validation loss of the best trainer has gone from 5.0000 to 3.6000" in told
    assert "Batches have stayed at 8" in told
    assert "All ranks have sent " in told and "% has gone into exposed averages" in told
    assert "1 worker of a trainer makes up to 1.50 times" in told
    assert "has asked for 6 at first and 6 now, and the minimum (batching.min_batch) decides in 2 of 2 rounds" in told
    assert not [word for word in ("went", "was", "decided", "at last") if f" {word} " in told]


def test_restarts_and_nodes_that_came_and_went(tmp_path: Path) -> None:
    start = {"started": "2026-01-31T12:10:00+00:00", "checkpoint": "0000001", "world_size": 2, "hosts": ["one", "two"]}
    restart = start | {"lost_hosts": ["three"]}  # of a version that recorded no more
    left = start | {"round": 2, "why": "node 10.0.0.3: its process has ended", "paused_seconds": 1.25}
    came = start | {"round": 3, "why": "newcomers", "paused_seconds": 0.75, "new_hosts": ["three"], "lost_hosts": []}
    rows = [*before_training(0), row(1), row(2)]
    shown = page(tmp_path, rows, ends=result(), facts={"resumed": [restart, left, came]})
    assert "The run was resumed 1 time, without three, which had been lost." in shown.sentences
    assert (
        "Nodes came or went 2 times; those who stayed paused for 2 s in all, which no axis counts." in shown.sentences
    )
    (table,) = [table for section in shown.sections for table in section.tables if table.title.startswith("Restarts")]
    assert [tuple(cells[1:8]) for cells in table.rows] == [
        ("", "2", "one, two", "three", "", "", ""),
        ("2", "2", "one, two", "", "", "node 10.0.0.3: its process has ended", "1.2 s"),
        ("3", "2", "one, two", "", "three", "newcomers", "0.8 s"),
    ]


def test_a_constant_one_is_no_figure(tmp_path: Path) -> None:
    assert "passes" not in figures(page(tmp_path / "whole", [row(1), row(2)]))
    assert "passes" in figures(page(tmp_path / "cut", [row(1), row(2, passes=3)]))


def test_the_link_of_a_run(tmp_path: Path) -> None:
    """Two trainers have workers on rank 0."""
    rows = [*before_training(0, 1)]
    for number in (1, 2):
        seconds = {"0": {"inner": 8.0, "transfer": 2.0 * number}}
        rows += [row(number, trainer, ranks=[0], rank_seconds=seconds) for trainer in (0, 1)]
    shown = {figure.name: figure for figure in page(tmp_path, rows).figures}
    assert [point["seconds of a round"] for point in shown["transfer"].points] == [4.0, 8.0]
    assert {point["TCP segments"] for point in shown["resent_packets"].points} == {7.0}


def test_trainers_that_merge(tmp_path: Path) -> None:
    rows = [*before_training(0, 1), *(row(number, trainer) for number in (1, 2) for trainer in (0, 1))]
    rows += [row(3, 1, ranks=[0, 1], workers=2, merge=MERGE, total_batch=16), row(4, 1, ranks=[0, 1], workers=2)]
    shown = page(tmp_path, rows)
    assert (
        "Before round 3 trainers 0 (0.25), 1 (0.75) became trainer 1: validation losses 3.9000, 3.7000, of the average "
        "3.6500; 2 workers on ranks {0,1} on node 0." in shown.sentences
    )
    tree = next(figure for figure in shown.figures if figure.name == "merges")
    lives = [point for point in tree.points if point["kind"] == "life"]
    shown_of_lives = ("trainer", "step", "step_end", "workers", "place", "after")
    assert [tuple(one[name] for name in shown_of_lives) for one in lives] == [
        (0, 0, 1, 1, "rank 0 on node 0", ""),
        (1, 0, 1, 1, "rank 1 on node 0", ""),
        (1, 1, 2, 2, "ranks {0,1} on node 0", "loss 3.6500"),
    ]
    joints = [point for point in tree.points if point["kind"] == "joint"]
    assert [(one["trainer"], one["survivor"], one["step"], one["before"]) for one in joints] == [
        (0, 1, 1, "weight 0.25, loss 3.9000"),
        (1, 1, 1, "weight 0.75, loss 3.7000"),
    ]
    assert "[['start'], ['before round 3', '20 s'], ['end of round 4', '40 s']][datum.value]" in str(
        tree.specification()
    )
    (table,) = [table for section in shown.sections for table in section.tables if table.title == "Merges"]
    assert table.rows == [
        ("3", "0 (0.2500), 1 (0.7500)", "1", "0: 3.9000, 1: 3.7000", "3.6500", "2 on ranks {0,1} on node 0",
         "worst_with_worst"),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [[], before_training(0, 1)])
def test_a_run_that_has_trained_nothing(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    shown = page(tmp_path, rows)
    assert shown.sentences == ["No round has been trained yet."]
    assert shown.html("").count("<h1>run</h1>") == 1


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    rows = [row(number) for number in range(1, 5)]
    rows[1] |= {"train_loss": None, "noise_scale": None, "request": None, "worth": None, "nonfinite_workers": [0]}
    rows[3] |= {"train_loss": math.nan}
    shown = page(tmp_path, [json.loads(json.dumps(one)) for one in rows])
    loss = next(figure for figure in shown.figures if figure.name == "loss")
    assert [point["round"] for point in loss.points] == [1, 3]
    assert "NaN" not in json.dumps(shown.data(), allow_nan=False)
    assert "Workers that were not finite were left out of averages in 1 round of a trainer." in shown.sentences


def test_losses_of_updates_are_spread_over_their_rounds_and_unknown_ones_are_left_out(tmp_path: Path) -> None:
    rows = [*before_training(0), row(1, step_losses=[4.0, 3.5]), row(2, step_losses=[None, 3.0]), row(3)]
    rows.append(row(4, step_losses=[None, None]))
    shown = page(tmp_path, rows)
    (figure,) = [one for one in shown.figures if one.name == "update_losses"]
    assert [(point["round"], point["loss"]) for point in figure.points] == [(0.5, 4), (1, 3.5), (2, 3)]
    assert "NaN" not in json.dumps(shown.data(), allow_nan=False)


def test_whatever_comes_from_outside_is_shown_as_text(tmp_path: Path) -> None:
    rows = [row(1, notes=[MARKUP], bound=MARKUP, ranks=[0], bytes_sent={MARKUP: 5})]
    facts = {"corpus": {"source": MARKUP, "digest": "0"}, "versions": {MARKUP: MARKUP}, "command": MARKUP}
    directory = tmp_path / "<img src=x onerror=alert(3)>"
    overrides = [f'run.directory="{MARKUP}"']
    shown = page_of(read_source(run_directory(directory, rows, overrides, result() | {"stop": MARKUP}, facts)))
    html = shown.html("")
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5
    assert "{{ 7 * 7 }}" in html


def test_a_hundred_thousand_rows_are_small_and_keep_their_extremes(tmp_path: Path) -> None:
    rows = [row(number, trainer) for number in range(1, 25_001) for trainer in range(4)]
    rows[4 * 12_344]["train_loss"] = 99.0  # trainer 0, round 12,345
    rows[4 * 20_000 + 3]["worth"] = 0.001  # trainer 3, round 20,001
    shown = page(tmp_path, rows)
    points = {figure.name: figure.points for figure in shown.figures}
    assert max(len(found) for found in points.values()) < 9_000
    assert {"series": "trainer 0", "round": 12_345, "loss": 99} in [
        {key: point[key] for key in ("series", "round", "loss")} for point in points["loss"]
    ]
    assert 0.001 in [point["worth"] for point in points["worth"]]
    assert len(json.dumps(shown.data())) < 8_000_000
