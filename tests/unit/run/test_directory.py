"""The run directory: one writer, whatever the file system thinks of locks, and nothing of an earlier run lost."""

import json
from pathlib import Path

import pytest

from adloco_dist.config import RunSettings, SettingsError, Unfinished
from adloco_dist.run.directory import DirectoryTakenError, RunDirectory, archive, is_finished, open_directory


def opened(path: Path, unfinished: Unfinished = Unfinished.refuse) -> RunDirectory:
    return open_directory(RunSettings(directory=str(path), unfinished=unfinished), needed_bytes=1)


def end(directory: RunDirectory, stop: str) -> None:
    result = {"stop": stop, "saved": None, "candidates": []}
    facts = {"settings": {}, "corpus": {"source": "", "digest": ""}, "result": result}
    (directory.path / "run.json").write_text(json.dumps(facts))
    directory.close()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = opened(tmp_path / "run")
    with pytest.raises(SettingsError, match="is being written by process"):
        opened(tmp_path / "run", Unfinished.archive)
    first.write([])
    first.close()
    second = opened(tmp_path / "run", Unfinished.archive)
    assert second.path == tmp_path / "run"
    assert (tmp_path / "run.archived-1").is_dir()
    second.close()


def test_a_writer_whose_directory_was_taken_over_stops(tmp_path: Path) -> None:
    """As on a file system where another host's lock is not seen."""
    first = opened(tmp_path / "run")
    (tmp_path / "run" / ".lock").write_text("process 1 on another since today")
    with pytest.raises(DirectoryTakenError, match="is now written by process 1 on another"):
        first.write([])
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(DirectoryTakenError, match="is gone"):
        first.write([])
    first.close()


def test_only_a_run_that_came_to_its_own_end_is_finished(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "nothing")
    end(opened(tmp_path / "done"), "budget=3rounds reached")
    end(opened(tmp_path / "stopped"), "interrupted")
    opened(tmp_path / "killed").close()
    assert [is_finished(tmp_path / name) for name in ("done", "stopped", "killed")] == [True, False, False]
    with pytest.raises(SettingsError, match="already holds a run"):
        opened(tmp_path / "done", Unfinished.archive)
    for name in ("stopped", "killed"):
        with pytest.raises(
            SettingsError, match=r"holds a run that has not ended; .*run.unfinished to resume or archive"
        ):
            opened(tmp_path / name)
        opened(tmp_path / name, Unfinished.archive).close()


def test_what_is_archived_keeps_its_files_under_the_first_free_name(tmp_path: Path) -> None:
    for number in (1, 2):
        end(opened(tmp_path / "run"), f"start {number}")
        archive("hydra.sweep.dir", tmp_path / "run")
    found = [json.loads((tmp_path / f"run.archived-{number}" / "run.json").read_text()) for number in (1, 2)]
    assert [facts["result"]["stop"] for facts in found] == ["start 1", "start 2"]
    assert not (tmp_path / "run").exists()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(SettingsError, match="holds other files"):
        opened(tmp_path / "run", Unfinished.archive)
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


def test_two_runs_of_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    runs = [open_directory(RunSettings(root=str(tmp_path)), needed_bytes=1) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        run.close()


def test_too_little_room_is_reported_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run.directory=.*MB are free, records and model take"):
        open_directory(RunSettings(directory=str(tmp_path / "a" / "run")), needed_bytes=10**18)
    assert list(tmp_path.iterdir()) == []
