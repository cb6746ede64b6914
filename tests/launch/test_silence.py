"""Ranks that are dead, stuck or slow: distinguished, and named."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from test_failures import ENDLESS

from adloco_dist.report.source import read_source
from adloco_dist.report.words import sentences
from helpers.commands import SMALL, errors, metrics, run, running, slow_down, small_without, train_command

STUCK = """
import os
if os.environ.get("RANK") == "1":
    import threading
    import adloco_dist.train as train
    run_round, rounds = train.run_round, []
    def stuck(rank, plan, *rest, **named):
        rounds.append(plan.round)
        if len(rounds) == 2:
            rank.runtime.heartbeat.enter("a place where it is stuck")
            threading.Event().wait()
        return run_round(rank, plan, *rest, **named)
    train.run_round = stuck
"""
HOLDING = """
import os
if os.environ.get("RANK") == "1":
    import ctypes
    import adloco_dist.run.profiler as profiler
    write = profiler._write_trace
    def long(*arguments):
        ctypes.PyDLL(None).sleep(7)  # without letting go of the interpreter, as torch does with a large trace
        write(*arguments)
    profiler._write_trace = long
"""


@pytest.fixture
def stuck_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("stuck_rank")
def test_a_timeout_names_who_was_waited_for(tmp_path: Path) -> None:
    done = run(train_command(*SMALL, "run.directory=run", "cluster.timeout_seconds=4"), tmp_path)
    assert done.code == 1, done.output
    (line,) = errors(done.output)
    here = os.uname().nodename
    assert f"rank 0 on {here}, waiting for rank 1 on {here} (a place where it is stuck), round 2, trainer 0: " in line
    assert "Timed out" in line or "timeout" in line


def test_a_silent_rank_is_taken_for_dead_and_named(tmp_path: Path) -> None:
    with running(train_command(*ENDLESS, "cluster.silence_seconds=3"), tmp_path) as (process, _):
        ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(process.pid).children()}
        ranks["1"].send_signal(signal.SIGSTOP)  # the process is there, and so are its connections
        ranks["0"].wait(timeout=30)
        ranks["1"].kill()  # a stopped process ignores the agent
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 1
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert re.search(rf"rank 1 on {os.uname().nodename}: silent for \d+ s \(", log), log
    assert len(errors(output)) == 1


def test_a_rank_that_is_a_hundred_times_slower_holds_nobody_up_and_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", slow_down(tmp_path, rank=1, factor=100))
    settings = (*small_without("budget", "evaluation.every"), "budget=12rounds", "run.directory=run")
    done = run(train_command(*settings, "algorithm.updates_per_round=2"), tmp_path)
    assert done.code == 0, done.output
    last = metrics(tmp_path / "run")[-1]
    fast, slow = last["worker_updates"]
    assert fast > 16 * slow
    seconds = last["rank_seconds"]["0"]
    waited = seconds.get("wait", 0.0) + seconds.get("control", 0.0)
    assert waited < seconds["inner"], "where both took as many updates, it would be a hundred times as long"
    assert any(sentence.startswith("It did not pay") for sentence in sentences(read_source(tmp_path / "run")))


def test_time_in_which_everything_stood_still_is_no_silence(tmp_path: Path) -> None:
    """Ctrl-Z, or a container that is frozen: longer than the patience with a rank."""
    with running(train_command(*ENDLESS, "cluster.silence_seconds=3"), tmp_path) as (process, _):
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        for one in everything:
            one.suspend()
        time.sleep(7)  # the length of the standstill is what is tried
        for one in everything:
            one.resume()
        assert process.stdout is not None
        assert any(line.startswith("round 60 ") for line in process.stdout), "it did not go on"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 75


def test_a_rank_that_writes_a_large_profile_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text(HOLDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chosen = ("profile.rounds=1", "cluster.silence_seconds=3")
    done = run(train_command(*SMALL, "run.directory=run", *chosen), tmp_path)
    assert done.code == 0, done.output
    assert (tmp_path / "run" / "profile" / "rank1-rounds1-1.json.gz").exists()
