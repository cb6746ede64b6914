"""How several runs compare, of records made by hand."""

from pathlib import Path

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.report.one import page_of
from adloco_dist.report.several import page_of_several, reached
from adloco_dist.report.source import Source, read_source
from adloco_dist.report.write import run_folders
from helpers.run_directories import before_training, result, row, run_directory


def run(path: Path, losses: list[float], *overrides: str, final: float | None = None, seconds: float = 10.0) -> Source:
    rows = before_training(0)
    rows += [
        row(number, validation_loss=loss, elapsed_seconds=seconds * number)
        for number, loss in enumerate(losses, start=1)
    ]
    return read_source(run_directory(path, rows, overrides, result(final) if final else None))


def test_costs_to_a_loss_and_differences_to_the_first(tmp_path: Path) -> None:
    first = run(tmp_path / "a", [4.0, 3.5, 3.0], "inner.lr=1e-3", final=2.9)
    second = run(tmp_path / "b", [3.4, 3.2], "inner.lr=2e-3", final=3.1, seconds=5)
    found = reached(first, 3.2)
    assert found
    assert (found["tokens"], found["bytes"], found["seconds"]) == (3000, 3 * 2_000_500, 30)
    assert reached(second, 3.0) is None
    page = page_of_several([first, second])
    tables = {table.title: table for section in page.sections for table in section.tables}
    costs = tables["What it took to a validation loss of 3.2000"]
    assert costs.rows == [("a", "3,000", "6 MB", "30 s", "1.000"), ("b", "2,000", "4 MB", "10 s", "0.333")]
    results = tables["What runs came to"]
    assert [line[:5] for line in results.rows] == [
        ("a", "0.001", "2.9000", "+0.0000", "3.0000"),
        ("b", "0.002", "3.1000", "+0.2000", "3.2000"),
    ]
    assert tables["Settings that differ"].rows == [("inner.lr", "0.001", "0.002")]


def test_what_runs_came_to_is_said_first(tmp_path: Path) -> None:
    first = run(tmp_path / "a", [4.0, 3.5, 3.0], "inner.lr=1e-3", final=2.9)
    second = run(tmp_path / "b", [3.4, 3.2], "inner.lr=2e-3", final=3.1, seconds=5)
    assert page_of_several([first, second]).sentences == [
        "a came to the lowest validation loss, 2.9000; b to the highest, 3.1000.",
        "To a loss of 3.2000 they took: b 10 s, a 30 s.",
    ]


def test_a_simulated_clock_is_named(tmp_path: Path) -> None:
    clocks = [
        run(tmp_path / name, [loss], *simulated, final=loss)
        for name, loss, *simulated in (("a", 4.0), ("b", 3.0, "simulation.update_seconds=0.1"))
    ]
    assert page_of_several(clocks).sentences[-1] == "Seconds are those of a simulated clock (simulation.*) in b."
    assert page_of_several(clocks[1:] * 2).sentences[-1].endswith("in all of them.")
    assert page_of(clocks[1]).sentences[0].startswith("1 round in 10 s of a simulated clock: ")


def test_runs_that_are_identical_are_named(tmp_path: Path) -> None:
    alike = [run(tmp_path / name, [4.0, 3.0], f"batching.eta={eta}") for name, eta in (("a", 0.5), ("b", 0.9))]
    other = run(tmp_path / "c", [4.0, 3.1])
    told = page_of_several([*alike, other]).sentences
    assert [line for line in told if "identical" in line] == [
        "a, b are identical in every loss: the settings in which they differ did nothing."
    ]
    told = page_of_several(alike).sentences
    assert told[0] == "All came to a validation loss of 3.0000."
    assert any(line.startswith("a, b are identical in every loss") for line in told)


def test_two_settings_that_changed_together_are_no_heat_map(tmp_path: Path) -> None:
    sources = [
        run(tmp_path / str(number), [4.0], f"inner.lr={rate}", f"batching.local_batch={number}", final=3.0)
        for number, rate in enumerate((1e-3, 2e-3, 3e-3, 4e-3, 5e-3), start=1)
    ]
    assert "heat_map" not in {figure.name for figure in page_of_several(sources).figures}


def test_two_swept_keys_are_a_heat_map_with_means_over_seeds(tmp_path: Path) -> None:
    losses = {("0.5", "1"): (3.0, 3.2), ("0.5", "2"): (2.8, 2.8), ("0.9", "1"): (2.6, 2.8), ("0.9", "2"): (2.0, 2.5)}
    sources = [
        run(
            tmp_path / f"{eta}-{n}-{seed}",
            [4.0],
            f"batching.eta={eta}",
            f"batching.switch_n={n}",
            f"seed={seed}",
            final=loss,
        )
        for (eta, n), both in losses.items()
        for seed, loss in enumerate(both)
    ]
    page = page_of_several(sources)
    (heat_map,) = [figure for figure in page.figures if figure.name == "heat_map"]
    assert heat_map.title == "batching.eta and batching.switch_n"
    cells = {(point["first"], point["second"]): (point["loss"], point["runs"]) for point in heat_map.points}
    assert cells == {
        ("0.5", "1"): (3.1, 2), ("0.5", "2"): (2.8, 2), ("0.9", "1"): (2.7, 2), ("0.9", "2"): (2.25, 2),
    }  # fmt: skip


def test_a_run_that_was_never_evaluated_stands_beside_others(tmp_path: Path) -> None:
    whole, empty = run(tmp_path / "x" / "run", [3.0], final=3.0), run(tmp_path / "y" / "run", [])
    page = page_of_several([whole, empty], wanted_loss=3.5)
    assert page.subtitle == "x/run, y/run"
    tables = {table.title: table for section in page.sections for table in section.tables}
    assert tables["What it took to a validation loss of 3.5000"].rows[1] == ("y/run", "not reached", "", "", "")


def test_a_folder_of_runs_is_its_runs(tmp_path: Path) -> None:
    for name in ("1", "0"):
        run(tmp_path / "sweep" / name, [3.0])
    (tmp_path / "sweep" / "multirun.yaml").touch()
    assert [path.name for path in run_folders(tmp_path / "sweep")] == ["0", "1"]
    assert run_folders(tmp_path / "sweep" / "0") == [tmp_path / "sweep" / "0"]
    with pytest.raises(SettingsError, match="is no run, and holds none"):
        run_folders(tmp_path)
