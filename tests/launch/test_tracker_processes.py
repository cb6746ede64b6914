"""Trackers that fail or hang wherever they can, in the processes that a run gives them: the records do not notice."""

import json
import sys
from pathlib import Path

import pytest

from adloco_dist.config import TrackingMode, TrackingSettings
from adloco_dist.config.compose import compose, to_plain
from adloco_dist.run.journal import Journal, MetricsFile, RunFile, strict_json
from adloco_dist.run.tracking import TrackerProcess, start_trackers
from helpers.commands import SLOW_SECONDS, metrics, wait_until
from helpers.run_directories import before_training, result, row
from helpers.tracked import curves

TRACKER = """
import sys, threading
from pathlib import Path
from adloco_dist.run.follow import follow

where, how, directory, patience = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])

class Broken:
    def at(self, place):
        print("at", place, flush=True)
        (directory / place).touch()
        if place == where and how == "raises":
            raise RuntimeError("no more of it\\nfor a long reason")
        if place == where and how == "exits":
            sys.exit(3)
        if place == where and how == "hangs":
            threading.Event().wait()
    def __init__(self):
        self.at("init")
    def write(self, round_number, values):
        self.at("write")
    def close(self, result):
        self.at("close")

follow(directory, 0, patience, lambda facts, next_round: Broken())
"""
PATIENCE_SECONDS = 2.0
ROUNDS = 3


def records(directory: Path, where: str, how: str) -> list[str]:
    """Write a run's records while such a tracker follows them; the lines that were reported."""
    notes: list[str] = []
    patience_seconds = PATIENCE_SECONDS if how == "hangs" else SLOW_SECONDS
    (directory / "tracker.py").write_text(TRACKER)
    run_file, metrics_file = RunFile(directory, {"settings": {}}), MetricsFile(directory)
    command = [sys.executable, str(directory / "tracker.py"), where, how, str(directory), str(patience_seconds)]
    tracker = TrackerProcess("Tracker", command, directory / "tracker.log", patience_seconds, notes.append)
    journal = Journal([tracker, run_file, metrics_file])
    journal.write(before_training(0))
    place = where if where == "write" else "init"
    wait_until((directory / place).exists, lambda: (directory / "tracker.log").read_text())
    for number in range(1, ROUNDS + 1):
        journal.write([row(number)])
    journal.close(result())
    journal.close(result())  # nothing is left to end
    return notes


@pytest.mark.parametrize("where", ["init", "write", "close"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "Tracker failed (RuntimeError: no more of it); "),
        ("exits", "Tracker failed (SystemExit: 3); "),
        ("hangs", "Tracker was not done after tracking.patience_seconds=2, and was ended; "),
    ],
)
def test_a_broken_tracker_costs_a_line(tmp_path: Path, where: str, how: str, said: str) -> None:
    notes = records(tmp_path, where, how)
    assert notes == [f"{said}the run's own records are complete (log: {tmp_path / 'tracker.log'})"]
    assert metrics(tmp_path) == [*before_training(0), *(row(number) for number in range(1, ROUNDS + 1))]
    assert json.loads((tmp_path / "run.json").read_text())["result"]["saved"] == "trainer 0"


def test_a_tracker_that_works_is_not_mentioned(tmp_path: Path) -> None:
    assert records(tmp_path, "nowhere", "raises") == []
    assert (tmp_path / "close").exists()


def test_a_tracker_that_is_killed_and_one_that_cannot_be_started(tmp_path: Path) -> None:
    notes: list[str] = []
    log = tmp_path / "log"
    log.write_text("of an earlier start\n")
    TrackerProcess("Tracker", [str(tmp_path / "nothing")], log, 1.0, notes.append).close(result())
    tracker = TrackerProcess("Tracker", ["/bin/sh", "-c", "kill -9 $$"], log, SLOW_SECONDS, notes.append)
    tracker.close(result())
    assert [note.partition(";")[0] for note in notes] == [
        "Tracker cannot be started (No such file or directory)",
        "Tracker failed (exit code -9)",
    ]


def test_a_run_that_failed_waits_for_no_tracker(tmp_path: Path) -> None:
    """One that hangs then ends by itself, and leaves in its log where it was."""
    notes: list[str] = []
    (tmp_path / "tracker.py").write_text(TRACKER)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    command = [sys.executable, str(tmp_path / "tracker.py"), "init", "hangs", str(tmp_path), "0.1"]
    tracker = TrackerProcess("Tracker", command, tmp_path / "log", PATIENCE_SECONDS, notes.append)
    process = tracker._process
    assert process
    tracker.close(None)
    assert process.wait() == 1
    assert "in at" in (tmp_path / "log").read_text()
    assert notes == []


def track(directory: Path, first: int, last: int, earlier_bytes: int) -> int:
    """One start of a run with TensorBoard, from one round to another; bytes of its records."""
    (directory / "logs").mkdir(exist_ok=True)
    settings = strict_json(to_plain(compose(["tracking=tensorboard"])))
    run_file, metrics_file = RunFile(directory, {"settings": settings}), MetricsFile(directory, earlier_bytes)
    notes: list[str] = []
    tracking = TrackingSettings(mode=TrackingMode.disabled, tensorboard=True)
    trackers = start_trackers(tracking, directory, metrics_file.num_bytes, None, notes.append)
    journal = Journal([*trackers, run_file, metrics_file])
    for number in range(first, last + 1):
        journal.write([row(number)])
    num_bytes = metrics_file.num_bytes
    journal.close(result())
    assert notes == []
    return num_bytes


def test_tensorboard_forgets_what_a_checkpoint_is_older_than(tmp_path: Path) -> None:
    earlier_bytes = track(tmp_path, 1, 2, 0)
    track(tmp_path, 3, 6, earlier_bytes)
    track(tmp_path, 3, 4, earlier_bytes)
    found = curves(tmp_path)["trainer0/train_loss"]
    assert sorted(found) == [1, 2, 3, 4], "rounds 5 and 6 were not repeated yet"


def test_a_tracker_that_comes_later_gets_all_rounds(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in (1, 2)))
    track(tmp_path, 3, 4, (tmp_path / "metrics.jsonl").stat().st_size)
    assert sorted(curves(tmp_path)["trainer0/train_loss"]) == [1, 2, 3, 4]
