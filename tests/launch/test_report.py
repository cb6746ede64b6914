"""The pages of real runs in a real browser, and what is done with folders that are none."""

import json
import math
import signal
from pathlib import Path

import pytest
from PIL import Image

from adloco_dist.messages import Json
from adloco_dist.report.source import read_source
from adloco_dist.report.write import page, write_page
from helpers.browser import Browser
from helpers.commands import (
    FOUR_TRAINERS,
    ONE_RANK,
    ROOT,
    SMALL,
    facts,
    metrics,
    run,
    running,
    small_without,
    train_command,
    use,
)
from helpers.run_directories import before_training, result, row, run_directory

SCREENSHOTS = ROOT / "build" / "screenshots"
MARKUP = "<img src=x onerror=alert(1)>"
POOL = (
    *small_without("run.report"), *FOUR_TRAINERS, "pool.trainers=2", "merge.every_rounds=2",
    "budget=5rounds",
)  # fmt: skip

pytestmark = pytest.mark.needs("browser")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two trainers that merge, in a folder whose name is markup, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    done = run(train_command("--nproc-per-node", "2", *POOL, f'run.directory="{MARKUP}"'), folder)
    assert done.code == 0, done.output
    return folder / MARKUP, done.output


def test_a_run_ends_by_naming_its_report(finished: tuple[Path, str]) -> None:
    directory, output = finished
    assert output.splitlines()[-1] == f"report: {MARKUP}/report.html"
    names = {path.stem for path in (directory / "figures").iterdir()}
    assert {"loss", "batch", "merges", "phases", "bytes"} <= names
    for path in (directory / "figures").iterdir():
        with Image.open(path) as picture:
            assert min(picture.size) > 100
            assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 10


def test_every_figure_is_drawn_and_no_error_is_on_the_console(finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.open((directory / "report.html").as_uri())
    marks = shown.marks()
    assert set(marks) == {path.stem for path in (directory / "figures").iterdir()}
    assert min(marks.values()) > 0, marks
    assert shown.errors() == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    shown.keep_screenshot(SCREENSHOTS / "report.png")


def test_the_axis_can_be_chosen(finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.open((directory / "report.html").as_uri())
    titles = {"updates": "updates of a worker", "tokens": "tokens of the pool", "bytes": "bytes sent by all ranks"}
    for axis, title in {**titles, "seconds": "seconds", "round": "round"}.items():
        shown.choose(axis)
        titles_of = {figure: found[0] for figure, found in shown.axis_titles().items() if found}
        assert set(titles_of.values()) == {title, "seconds"}  # of ranks: always
        assert shown.axis_titles()["merges"] == [], "merges are evenly spaced, against no axis"
        assert min(shown.marks().values()) > 0
    assert shown.errors() == []


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_the_page_fits_any_width(width: int, finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.resize(width)
    shown.open((directory / "report.html").as_uri())
    assert shown.scroll_width() <= width
    filled = [drawn / room for drawn, room in shown.widths(".figure svg.marks", ".card")]
    assert filled and min(filled) > 0.85, "charts fill their cards"
    shown.keep_screen(SCREENSHOTS / f"report-{width}.png")
    assert shown.lowest(".words") < 900 or width < 800, "what happened is told on the first screen"
    assert shown.errors() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_and_drawn_can_be_seen(scheme: str, finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.prefer(scheme)
    shown.open((directory / "report.html").as_uri())
    assert min(shown.contrasts("h1, h2, h3, p, li, td, th, summary, .tile span, .tile b, button")) >= 4.5
    assert min(shown.contrasts(".role-axis text, .role-legend text")) >= 4.5
    assert shown.elements(".role-legend-symbol path") > 0
    assert shown.colourless(".role-legend-symbol path") == 0


def test_curves_can_be_chosen_smoothed_and_zoomed(finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.open((directory / "report.html").as_uri())
    at_first = shown.curves("outer_norm")
    assert [opacity for _, opacity in at_first] == [1, 1], "of two trainers"
    shown.click("#figure-outer_norm .role-legend-symbol path")
    shown.wait_until_curves("outer_norm", lambda curves: sorted(opacity for _, opacity in curves) == [0.05, 1])
    shown.choose("updates")
    assert sorted(opacity for _, opacity in shown.curves("outer_norm")) == [0.05, 1], "it stays chosen"
    shown.choose("round")
    shown.smooth(0.9)
    smoothed = shown.curves("outer_norm")
    assert [way for way, _ in smoothed] != [way for way, _ in at_first]
    shown.zoom("#figure-outer_norm .mark-line path")
    shown.wait_until_curves("outer_norm", lambda curves: curves != smoothed)
    zoomed = shown.curves("outer_norm")
    shown.smooth(0.9)
    assert shown.curves("outer_norm") == zoomed, "drawn again, as whenever a live page goes on"
    shown.choose("updates")
    shown.choose("round")
    assert shown.curves("outer_norm") == smoothed, "against another axis it is whole"
    assert shown.errors() == []


def test_kinds_of_curves_can_be_chosen_of_one_trainer(tmp_path: Path, shown: Browser) -> None:
    rows = [*before_training(0), *(row(number, validation_loss=4.5) for number in range(1, 4))]
    path = write_page(page([read_source(run_directory(tmp_path / "run", rows))]), tmp_path)
    shown.open(path.as_uri())
    assert [opacity for _, opacity in shown.curves("loss")] == [0.35, 1], "training stands back"
    shown.click("#figure-loss .role-legend-symbol path")
    shown.wait_until_curves("loss", lambda curves: [opacity for _, opacity in curves] == [0.35, 0.05])
    shown.choose("updates")
    assert [opacity for _, opacity in shown.curves("loss")] == [0.35, 0.05], "it stays chosen"
    assert shown.errors() == []


@pytest.mark.parametrize("figure", ["bytes", "bounds", "phases"])
def test_areas_and_bars_can_be_chosen(figure: str, finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.open((directory / "report.html").as_uri())
    mark = ".mark-area path" if figure == "bytes" else ".mark-rect path"
    before = shown.opacities(figure, mark)
    assert len(set(before)) == 1
    shown.click(f"#figure-{figure} .role-legend-symbol path")
    shown.wait_until(lambda: sorted(set(shown.opacities(figure, mark))) == [0.05, before[0]])
    assert shown.errors() == []


def test_the_page_says_what_the_records_say(finished: tuple[Path, str], shown: Browser) -> None:
    directory, _ = finished
    shown.open((directory / "report.html").as_uri())
    text, (merge,) = shown.text(), facts(directory)["merges"]
    assert f"Before round {merge['before_round']} trainers" in text
    assert f"became trainer {merge['survivor']}" in text
    assert f"{metrics(directory)[-1]['pool_tokens']:,} tokens" in text
    assert text.startswith(MARKUP)
    assert shown.elements("img") == 0


def test_a_run_that_was_killed_is_shown_as_far_as_it_came(tmp_path: Path, shown: Browser) -> None:
    with running(train_command(*ONE_RANK, *SMALL, "budget=500rounds", "run.directory=killed"), tmp_path) as (
        process,
        _,
    ):
        while_it_trains = use("report.py", "killed", cwd=tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert while_it_trains.output.splitlines() == ["killed/report.html"]
    shown.open((tmp_path / "killed" / "report.html").as_uri())
    assert "training" in shown.text()
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 400, "trai')  # as a power cut leaves it
    assert use("report.py", "killed", cwd=tmp_path).output.splitlines() == ["killed/report.html"]
    shown.open((tmp_path / "killed" / "report.html").as_uri())
    assert "no end was recorded" in shown.text()
    assert min(shown.marks().values()) > 0
    assert shown.errors() == []


@pytest.mark.parametrize(
    "rows",
    [
        [*before_training(0), *(row(number) for number in range(1, 6))],
        [],
        before_training(0, 1),
        [row(number, train_loss=math.nan, validation_loss=math.inf if number % 2 else None) for number in range(1, 6)],
        [row(number, train_loss=4 + number % 7) for number in range(1, 100_001)],
        [row(number, rank_seconds=None, bytes_sent=None, elapsed_seconds=None, worth=None) for number in range(1, 6)],
    ],
    ids=["one trainer", "nothing recorded", "nothing trained", "not finite", "100,000 rounds", "an older version"],
)
def test_pages_of_all_kinds_of_records_are_drawn(rows: list[Json], tmp_path: Path, shown: Browser) -> None:
    written = run_directory(tmp_path / "run", rows)
    path = write_page(page([read_source(written)]), tmp_path)
    shown.open(path.as_uri())
    figures = {picture.stem for picture in (tmp_path / "figures").iterdir()}
    assert set(shown.marks()) == figures
    assert bool(figures) == bool(rows)
    if any(one["round"] for one in rows):  # else curves are single points
        assert min(shown.marks().values()) > 0
    assert shown.errors() == []


def test_runs_of_a_sweep_stand_side_by_side(tmp_path: Path, shown: Browser) -> None:
    swept = ("pool.trainers=1", "algorithm.updates_per_round=2,4", "inner.lr=1e-3,2e-3", "hydra.sweep.dir=grid")
    settings = (*small_without("run.report"), "algorithm=diloco")
    done = run(train_command("-m", "--jobs", "2", "--nproc-per-node", "1", *settings, *swept), tmp_path)
    assert done.code == 0, done.output
    assert done.output.splitlines()[-1] == "report: grid/report.html"
    shown.open((tmp_path / "grid" / "report.html").as_uri())
    assert {"validation", "train_loss", "heat_map"} <= set(shown.marks())
    assert min(shown.marks().values()) > 0
    assert "4 runs" in shown.text()
    assert shown.errors() == []
    shown.choose("tokens")
    assert shown.axis_titles()["validation"] == ["tokens of the pool", "loss"]
    directories = sorted(path.parent.name for path in (tmp_path / "grid").glob("*/run.json"))
    two = use("report.py", *(f"grid/{name}" for name in directories[:2]), cwd=tmp_path)
    assert two.output.splitlines() == ["report/report.html"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_cell_of_a_heat_map_can_be_read(scheme: str, tmp_path: Path, shown: Browser) -> None:
    """Of losses from one end of its colours to the other."""
    shown.prefer(scheme)
    sources = []
    for place in range(36):
        changed = (f"algorithm.updates_per_round={place % 6 + 1}", f"inner.lr={1e-3 * (place // 6 + 1)}")
        loss = 3 + place / 35
        rows = [*before_training(0), row(1, validation_loss=loss)]
        sources.append(read_source(run_directory(tmp_path / str(place), rows, changed, result(loss))))
    shown.open(write_page(page(sources), tmp_path).as_uri())
    contrasts = shown.contrasts_in_cells("heat_map")
    assert len(contrasts) == 36
    assert min(contrasts) >= 4.5, contrasts
    assert min(shown.contrasts("h1, h2, h3, p, li, td, th, button")) >= 4.5


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_several_merges_and_several_runs_fit_any_width(width: int, tmp_path: Path, shown: Browser) -> None:
    """The table has what the picture of the merges has no room for."""
    merges = []
    for round_, (ended, survivor) in enumerate([(2, 3), (0, 3), (1, 3)], start=2):
        candidates = {str(member): {"request": 8.0, "bounded": 8.0} for member in (ended, survivor)}
        shares = dict.fromkeys(candidates, 0.5)
        losses = dict.fromkeys(candidates, 3.9)
        policy = {"survivor": survivor, "policy": "worst_with_worst", "member_losses": losses, "loss": 3.8}
        merges.append(row(round_, survivor, merge={**policy, "shares": shares, "candidates": candidates}))
    first = [row(1, trainer) for trainer in range(4)]
    rows = [*before_training(0, 1, 2, 3), *first, *merges, row(5, 3)]
    shown.resize(width)
    run_of_four = read_source(run_directory(tmp_path / "four", rows, ends=result()))
    for sources in ([run_of_four], [run_of_four, read_source(run_directory(tmp_path / "two", rows, ends=result()))]):
        shown.open(write_page(page(sources), tmp_path).as_uri())
        assert shown.scroll_width() <= width
        assert shown.errors() == []
    assert shown.elements("td") > 0


def test_what_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "nonsense").mkdir()
    (tmp_path / "nonsense" / "metrics.jsonl").write_bytes(b"\xff\xfe nonsense\n[]\n")
    for name, rule in {
        "no": "is no directory",
        "file": "is no directory",
        "empty": "is no run, and holds none",
        "nonsense": "has no readable run.json",
    }.items():
        done = use("report.py", name, cwd=tmp_path)
        assert done.code == 2
        (line,) = done.output.splitlines()
        assert line.startswith(f"error: RUN={name}: ")
        assert rule in line
    assert not list(tmp_path.glob("*/report.html"))


def test_lines_that_are_left_out_are_named_on_the_terminal_and_on_the_page(
    finished: tuple[Path, str], tmp_path: Path, shown: Browser
) -> None:
    rows = metrics(finished[0])
    (tmp_path / "damaged").mkdir()
    lines = [json.dumps(row) for row in rows]
    lines[3] = lines[3][:40]
    (tmp_path / "damaged" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    done = use("report.py", "damaged", cwd=tmp_path)
    assert done.code == 0
    notes = [line for line in done.output.splitlines() if line.startswith("note: ")]
    assert any("metrics.jsonl: 1 line is left out, the first: line 4" in line for line in notes)
    shown.open((tmp_path / "damaged" / "report.html").as_uri())
    assert "metrics.jsonl: 1 line is left out" in shown.text()
    assert min(shown.marks().values()) > 0
