"""Rounds under torch's profiler on one rank: which are written, and what happens where they cannot be."""

import gzip
import json
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.run.profiler import RoundProfiler
from helpers.processes import run_ranks


def enter_rounds(runtime: Runtime, folder: str, chosen: range, rounds: range) -> list[str]:
    """Pass through some rounds; what was reported."""
    lines: list[str] = []
    profiler = RoundProfiler(chosen, Path(folder), runtime, lines.append)
    for number in rounds:
        profiler.enter(number)
        with record_function(f"round {number}"):
            torch.ones(3).sum()
    profiler.end()
    return lines


def rounds_in(path: Path) -> list[str]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_chosen_rounds_alone_are_in_the_file(tmp_path: Path) -> None:
    (lines,) = run_ranks(enter_rounds, [0], str(tmp_path / "profile"), range(3, 6), range(1, 8))
    assert lines == [f"profile of rounds 3 to 5, a file for every rank: {tmp_path / 'profile'}"]
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank0-rounds3-5.json.gz"
    assert rounds_in(path) == ["round 3", "round 4", "round 5"]


def test_a_start_that_ends_among_them_leaves_what_there_is_and_the_next_one_the_rest(tmp_path: Path) -> None:
    for rounds in (range(1, 5), range(4, 8)):  # stopped in the fourth round, which is resumed
        run_ranks(enter_rounds, [0], str(tmp_path), range(3, 6), rounds)
    assert {path.name: rounds_in(path) for path in tmp_path.iterdir()} == {
        "rank0-rounds3-4.json.gz": ["round 3", "round 4"],
        "rank0-rounds4-5.json.gz": ["round 4", "round 5"],
    }


def test_rounds_that_never_come_are_reported(tmp_path: Path) -> None:
    (lines,) = run_ranks(enter_rounds, [0], str(tmp_path / "profile"), range(9, 10), range(1, 4))
    assert lines == ["profile.rounds=9:9: nothing was profiled, for this start trained rounds 1 to 3"]
    (lines,) = run_ranks(enter_rounds, [0], str(tmp_path / "profile"), range(2, 3), range(0))
    assert lines == ["profile.rounds=2:2: nothing was profiled, for this start trained no round"]
    assert not (tmp_path / "profile").exists()


def test_a_file_that_cannot_be_written_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("no folder")
    (lines,) = run_ranks(enter_rounds, [0], str(tmp_path / "profile"), range(2, 3), range(1, 5))
    (line,) = lines
    assert line.startswith("rank 0: ")
    assert line.endswith("rank0-rounds2-2.json.gz is not written: File exists")


def enter_without_room(runtime: Runtime, folder: str) -> list[str]:
    """As `enter_rounds`, where no file can be larger than 4 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return enter_rounds(runtime, folder, range(2, 3), range(1, 5))


def test_a_trace_for_which_there_is_no_room_leaves_nothing(tmp_path: Path) -> None:
    (lines,) = run_ranks(enter_without_room, [0], str(tmp_path))
    (line,) = lines
    assert line.endswith("is not written: torch could not write the trace; there may be no room for it")
    assert list(tmp_path.iterdir()) == []
