"""Records as columns: whole, cut, damaged, of older versions, and those that were written meanwhile."""

import json
from pathlib import Path

import numpy as np
import pytest

from adloco_dist.config import SettingsError
from adloco_dist.report import columns
from adloco_dist.report.history import History, read_history
from adloco_dist.report.one import page_of
from adloco_dist.report.source import read_source
from helpers.run_directories import before_training, result, row, run_directory


def written(path: Path, *lines: str) -> Path:
    (path / "metrics.jsonl").write_text("".join(lines))
    return path / "metrics.jsonl"


def line(*records: dict[str, object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_axes_add_up_what_has_passed(tmp_path: Path) -> None:
    rows = [*before_training(0, 1), *(row(number, trainer) for number in (1, 2) for trainer in (0, 1))]
    history = read_history(written(tmp_path, line(*rows)))
    assert history.trainers == [0, 1]
    assert history.num_rounds == 2
    assert {name: values.tolist() for name, values in history.axes.items()} == {
        "round": [0, 1, 2],
        "updates": [0, 4, 8],
        "tokens": [0, 1000, 2000],
        "bytes": [0, 4_001_000, 8_002_000],
        "seconds": [0, 10, 20],
    }


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    text = line(row(1), row(2))
    path = written(tmp_path, text[:-20])
    history = read_history(path)
    assert history.rounds.tolist() == [1]
    assert not history.columns.problems
    assert read_history(path, history) is history, "nothing was written since"
    written(tmp_path, text)
    history = read_history(path, history)
    assert history.rounds.tolist() == [1, 2]
    assert not history.columns.problems
    assert history.columns.num_bytes == len(text)


def test_records_without_a_line_have_no_problem(tmp_path: Path) -> None:
    history = read_history(written(tmp_path))
    assert not len(history.rounds)
    assert not history.columns.problems


def test_lines_that_are_no_records_are_left_out_and_reported(tmp_path: Path) -> None:
    history = read_history(written(tmp_path, line(row(1)), '{"round": 2, "tra\n', "[]\n", "\n", line(row(3))))
    assert history.rounds.tolist() == [1, 3]
    assert [problem.partition(":")[0] for problem in history.columns.problems] == ["line 2", "line 3", "line 4"]


def test_what_is_read_in_blocks_by_several_processes_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*before_training(0, 1), *(row(number, trainer) for number in range(1, 6) for trainer in (0, 1))]
    rows[4] |= {"notes": ["slow"], "step_losses": [3.0, None]}
    rows[7] |= {"statistics": {"squared_norm": 4.0}}
    path = written(tmp_path, line(*rows[:6]), "{\n", line(*rows[6:]), "nonsense\n")
    whole = read_history(path)
    monkeypatch.setattr(columns, "BLOCK_BYTES", 1000)
    assert path.stat().st_size > columns.FEW_BLOCKS * 1000
    in_blocks = read_history(path)
    assert [problem.partition(":")[0] for problem in in_blocks.columns.problems] == ["line 7", "line 14"]
    assert in_blocks.columns.problems == whole.columns.problems
    assert page_data(in_blocks) == page_data(whole)
    with path.open("a") as file:
        file.write("[]\n")
    assert read_history(path, in_blocks).columns.problems[-1].startswith("line 15:")


def page_data(history: History) -> tuple[object, ...]:
    """What figures are drawn from."""
    return (
        {name: values.tolist() for name, values in history.axes.items()},
        {kind: sent.tolist() for kind, sent in history.bytes_sent.items()},
        history.rank_seconds,
        str(history.resources),
        str(history.values("gradient_norm")),
        str(history.grouped("step_losses")),
        [row.notes for row in history.told if row.notes],
        str(history.grouped("bound")),
    )


def test_records_of_a_version_without_clock_and_rank_seconds(tmp_path: Path) -> None:
    """Seconds are added up from the steps of the rounds; nothing is made up for what was not recorded."""
    old = [row(number, elapsed_seconds=None, rank_seconds=None, utilisation=None) for number in (1, 2)]
    source = read_source(run_directory(tmp_path / "run", [*before_training(0)[:0], *old], ends=result()))
    assert source.history.axes["seconds"].tolist() == [10, 20]
    assert source.history.rank_seconds == {}
    assert not source.problems


def test_numbers_that_are_unknown_are_nan(tmp_path: Path) -> None:
    path = written(tmp_path, line(row(1, train_loss=None)) + line({**row(2), "train_loss": None}) + line(row(3)))
    history = read_history(path)
    np.testing.assert_array_equal(history.values("train_loss"), [np.nan, np.nan, 3.97])


def test_a_note_is_told_once_with_the_rounds_that_say_it(tmp_path: Path) -> None:
    rows = [row(number, notes=["slow"] if number in (2, 3, 7) else []) for number in range(1, 9)]
    page = page_of(read_source(run_directory(tmp_path / "run", rows)))
    (notes,) = [table for section in page.sections for table in section.tables if table.title == "Notes"]
    assert notes.rows == [("2 to 7", "0", "slow")]


def test_reading_on_sees_what_was_written_since_and_a_run_that_began_again(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", [*before_training(0), row(1)])
    source = read_source(directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(line(row(2, validation_loss=1.5)))
    source = read_source(directory, source.history)
    assert source.history.rounds.tolist() == [0, 1, 2]
    assert source.history.values("validation_loss")[-1] == 1.5
    written(directory, line(row(5)))
    assert read_source(directory, source.history).history.rounds.tolist() == [5]


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    for path, rule in ((tmp_path, "has neither run.json nor metrics.jsonl"), (tmp_path / "no", "is no directory")):
        with pytest.raises(SettingsError, match=rule) as refused:
            read_source(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["", "nonsense", '{"settings": 3}'])
def test_a_damaged_run_json_leaves_what_records_show(tmp_path: Path, content: str) -> None:
    directory = run_directory(tmp_path / "run", [row(1)])
    (directory / "run.json").write_text(content)
    source = read_source(directory)
    assert source.history.num_rounds == 1
    (problem,) = source.problems
    assert problem.startswith("run.json is not what a run writes")
