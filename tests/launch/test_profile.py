"""Profiled rounds of real runs: a file of every rank that holds what it did in them, and nothing else changes."""

import gzip
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_failures import ENDLESS

from helpers.commands import FOUR_TRAINERS, SMALL, errors, metrics, run, running, train_command

WANTED = (
    *SMALL, *FOUR_TRAINERS, "pool.trainers=2", "pool.workers_per_trainer=2", "budget=4rounds",
    "wire.fragments=2", "wire.delay_updates=1", "wire.format=int8", "checkpoint.every=1rounds",
)  # fmt: skip
PROFILED = (2, 3)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directory of a run of which two rounds are profiled, and of the same run without."""
    folder = tmp_path_factory.mktemp("profile")
    for name, more in (("with", ["profile.rounds=2:3"]), ("without", [])):
        done = run(train_command(*WANTED, f"run.directory={name}", *more), folder)
        assert done.code == 0, done.output
        assert (f"note: profile of rounds 2 to 3, a file for every rank: {name}/profile" in done.output) == bool(more)
        assert "profiler_start" not in done.output, "torch's own chatter"
    return folder / "with", folder / "without"


def spans(path: Path) -> list[dict[str, Any]]:
    """What is named in a trace."""
    with gzip.open(path) as file:
        trace = json.load(file)
    return [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation" and event["ph"] == "X"]


def test_every_rank_names_the_phases_of_those_rounds(both: tuple[Path, Path]) -> None:
    files = sorted(path.name for path in (both[0] / "profile").iterdir())
    assert files == ["rank0-rounds2-3.json.gz", "rank1-rounds2-3.json.gz"]
    for rank, name in enumerate(files):
        found = spans(both[0] / "profile" / name)
        assert all(span["dur"] > 0 for span in found)
        count = Counter(span["name"] for span in found)
        assert [one for one in count if one.startswith("round ")] == ["round 2", "round 3"]
        assert count["plan"] >= 2
        # None is written while the one before still is, so the records say how many there were before rounds 3 and 4.
        rows = [row for row in metrics(both[0]) if row["round"] in (3, 4) and row["trainer"] == 0]
        assert count["checkpoint"] == sum("checkpoint" in row["rank_seconds"][str(rank)] for row in rows) > 0
        assert count["evaluation"] == count["measure"] == 2
        for trainer in (0, 1):
            assert count[f"trainer {trainer}, worker {rank}"] >= 2
        rounds = {span["name"]: (span["ts"], span["ts"] + span["dur"]) for span in found if span["name"][:5] == "round"}
        for phase in ("inner", "outer"):
            starts = [span["ts"] for span in found if span["name"] == phase]
            assert all(any(first <= start <= last for start in starts) for first, last in rounds.values()), phase
        threads = {span["name"]: span["tid"] for span in found}
        assert threads["transfer"] != threads["inner"], "averages travel in a thread of their own"


def test_training_is_the_same(both: tuple[Path, Path]) -> None:
    profiled, plain = (directory / "model" / "model.safetensors" for directory in both)
    assert profiled.read_bytes() == plain.read_bytes()
    losses = [[(row.get("train_loss"), row.get("validation_loss")) for row in metrics(one)] for one in both]
    assert losses[0] == losses[1]
    assert not (both[1] / "profile").exists()


def test_a_run_that_is_stopped_within_those_rounds_leaves_what_there_is(tmp_path: Path) -> None:
    with running(train_command(*ENDLESS, "profile.rounds=2:99999"), tmp_path, until="round 3 ") as (process, _):
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    paths = sorted((tmp_path / "run" / "profile").iterdir())
    assert [path.name.split("-")[0] for path in paths] == ["rank0", "rank1"]
    for path in paths:
        rounds = [span["name"] for span in spans(path) if span["name"].startswith("round ")]
        assert rounds[:2] == ["round 2", "round 3"]


def test_what_names_no_rounds_is_refused_before_training(tmp_path: Path) -> None:
    done = run(train_command(*SMALL, "run.directory=run", "profile.rounds=5:3"), tmp_path)
    assert done.code == 2
    (line,) = errors(done.output)
    assert line.startswith("error: profile.rounds=5:3: must be the first and the last round to profile")
    assert not (tmp_path / "run").exists()
