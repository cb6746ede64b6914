"""Trackers that fail or hang wherever they can, in the threads that a run gives them: the records do not notice."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adloco_dist.config import TrackingMode, TrackingSettings
from adloco_dist.config.compose import compose, to_plain
from adloco_dist.messages import Json, strict_json
from adloco_dist.run import tracking
from adloco_dist.run.journal import Journal, MetricsFile, RunFile
from adloco_dist.run.tracking import BackgroundTracker, Values, start_trackers
from helpers.commands import SLOW_SECONDS, metrics
from helpers.run_directories import before_training, result, row, typed
from helpers.tracked import curves

ROUNDS = 3


@pytest.fixture
def unblocked() -> Iterator[threading.Event]:
    """Lets trackers that hang go on when a test has ended."""
    event = threading.Event()
    yield event
    event.set()


class Broken:
    """A tracker that fails or hangs in one place."""

    newest = -1

    def __init__(self, where: str, how: str, unblocked: threading.Event) -> None:
        self._where, self._how, self._unblocked = where, how, unblocked
        self.rounds: list[int] = []
        self.results: list[Json | None] = []
        self._at("init")

    def write(self, values: Values) -> None:
        self._at("write")
        self.rounds.append(int(values["round"]))

    def close(self, result: Json | None) -> None:
        self._at("close")
        self.results.append(result)

    def _at(self, place: str) -> None:
        if place == self._where and self._how == "raises":
            raise RuntimeError("no more of it\nfor a long reason")
        if place == self._where and self._how == "exits":
            raise SystemExit(3)
        if place == self._where and self._how == "hangs":
            self._unblocked.wait()


def records(directory: Path, where: str, how: str, unblocked: threading.Event) -> tuple[list[str], list[Broken]]:
    """Write a run's records beside such a tracker: the lines that were reported, and the tracker if it was opened."""
    notes: list[str] = []
    opened: list[Broken] = []

    def open_tracker(last_round: int) -> Broken:
        opened.append(Broken(where, how, unblocked))
        return opened[-1]

    run_file, metrics_file = RunFile(directory, {"settings": {}}), MetricsFile(directory)
    tracker = BackgroundTracker("Tracker", open_tracker, directory, 0, notes.append)
    journal = Journal([tracker, run_file, metrics_file])
    journal.write(typed(before_training(0)))
    for number in range(1, ROUNDS + 1):
        journal.write(typed([row(number)]))
    journal.close(result())
    return notes, opened


@pytest.mark.parametrize("where", ["init", "write", "close"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "Tracker failed (RuntimeError: no more of it); "),
        ("exits", "Tracker failed (SystemExit: 3); "),
        ("hangs", "Tracker was not done 1 seconds after the end, and is left alone; "),
    ],
)
def test_a_broken_tracker_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unblocked: threading.Event, where: str, how: str, said: str
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE_SECONDS", 1.0 if how == "hangs" else SLOW_SECONDS)
    notes, _ = records(tmp_path, where, how, unblocked)
    assert notes == [f"{said}the run's own records are complete"]
    assert [line["round"] for line in metrics(tmp_path)] == list(range(ROUNDS + 1))
    assert json.loads((tmp_path / "run.json").read_text())["result"]["saved"] == "trainer 0"


def test_a_tracker_that_works_is_not_mentioned(tmp_path: Path, unblocked: threading.Event) -> None:
    notes, (tracker,) = records(tmp_path, "nowhere", "raises", unblocked)
    assert notes == []
    assert tracker.rounds == list(range(ROUNDS + 1))
    assert tracker.results == [json.loads((tmp_path / "run.json").read_text())["result"]], "with the run's totals"


def test_rounds_that_a_hanging_tracker_leaves_waiting_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unblocked: threading.Event
) -> None:
    monkeypatch.setattr(tracking, "MAX_WAITING_ROUNDS", 2)
    monkeypatch.setattr(tracking, "PATIENCE_SECONDS", 0.0)
    notes, _ = records(tmp_path, "init", "hangs", unblocked)
    assert notes == ["Tracker falls behind and misses rounds from 2 on; the run's own records are complete"]
    assert len(metrics(tmp_path)) == ROUNDS + 1


def test_a_run_that_failed_waits_a_moment_for_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unblocked: threading.Event
) -> None:
    monkeypatch.setattr(tracking, "FAILED_SECONDS", 0.0)
    (tmp_path / "metrics.jsonl").touch()
    notes: list[str] = []
    BackgroundTracker("Tracker", lambda last: Broken("init", "hangs", unblocked), tmp_path, 0, notes.append).close(None)
    assert notes == []
    monkeypatch.setattr(tracking, "FAILED_SECONDS", SLOW_SECONDS)
    working = Broken("nowhere", "", unblocked)
    BackgroundTracker("Tracker", lambda last: working, tmp_path, 0, notes.append).close(None)
    assert (notes, working.results) == ([], [None])


def track(directory: Path, first: int, last: int, earlier_bytes: int) -> int:
    """One start of a run with TensorBoard, from one round to another; bytes of its records."""
    settings = strict_json(to_plain(compose(["tracking=tensorboard"])))
    run_file, metrics_file = RunFile(directory, {"settings": settings}), MetricsFile(directory, earlier_bytes)
    notes: list[str] = []
    chosen = TrackingSettings(mode=TrackingMode.disabled, tensorboard=True)
    trackers = start_trackers(chosen, settings, directory, metrics_file.num_bytes, None, notes.append)
    journal = Journal([*trackers, run_file, metrics_file])
    for number in range(first, last + 1):
        journal.write(typed([row(number)]))
    journal.close(result())
    assert notes == []
    return metrics_file.state()["metrics_bytes"]


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
