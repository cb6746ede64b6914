"""Runs that fail, are stopped, or are not alone: reported once, with codes for scripts, and nothing is lost."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from helpers.commands import (
    FOUR_TRAINERS,
    ONE_RANK,
    SMALL,
    break_outer_step,
    errors,
    facts,
    metrics,
    run,
    running,
    torchrun_command,
    train_command,
)

ENDLESS = (*SMALL, "budget=100000rounds", "run.directory=run")
AGENT_GONE_SECONDS = 5.0
"""Within this the ranks of an agent that was killed have ended: what the project promises, not what it takes."""


@pytest.fixture
def broken_outer_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", break_outer_step(tmp_path, rank=1, trainer=3))


@pytest.mark.usefixtures("broken_outer_step")
def test_an_error_names_rank_round_and_trainer_once(tmp_path: Path) -> None:
    done = run(train_command(*SMALL, *FOUR_TRAINERS, "run.directory=run"), tmp_path)
    assert done.code == 1
    (line,) = errors(done.output)
    assert line == f"error: rank 1 on {os.uname().nodename}, round 2, trainer 3: ArithmeticError: the outer step broke"
    assert "Traceback" not in done.output
    log = (tmp_path / "run" / "logs" / "rank1.log").read_text()
    assert "Traceback" in log, "the whole story is in the rank's own log"
    assert "round 1: trainer 1: inner" in log
    other = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    detail = f"rank 1 on {os.uname().nodename}, round 2, trainer 3: ArithmeticError: the outer step broke"
    assert detail in other, "who only lost contact says whom it lost"
    assert facts(tmp_path / "run")["result"] is None


@pytest.mark.usefixtures("broken_outer_step")
def test_torchrun_finds_the_error_in_its_file(tmp_path: Path) -> None:
    standalone = ("--standalone", "--nproc-per-node", "2")
    done = run(torchrun_command(*SMALL, *FOUR_TRAINERS, "run.directory=run", torchrun=standalone), tmp_path)
    assert done.code == 1
    assert "round 2, trainer 3: ArithmeticError: the outer step broke" in done.output, "in torchrun's own summary"


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with running(train_command(*ENDLESS), tmp_path) as (process, _):
        ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(process.pid).children()}
        ranks["1"].kill()
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 1
    (line,) = errors(output)
    assert line == f"error: rank 1 on {os.uname().nodename}: ended by SIGKILL; was memory short?"


def test_ranks_end_when_their_agent_is_gone(tmp_path: Path) -> None:
    with running(train_command(*ENDLESS), tmp_path) as (process, _):
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=AGENT_GONE_SECONDS)
        assert (len(gone), alive) == (2, [])


def test_a_request_to_stop_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    with running(train_command(*ENDLESS), tmp_path) as (process, _):
        os.killpg(process.pid, signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 75, output
    assert facts(tmp_path / "run")["result"]["stop"] == "interrupted"
    assert "run.unfinished=resume resumes it" in output
    assert "Traceback" not in output
    resumed = run(train_command(*ENDLESS, "run.unfinished=resume", "budget=3rounds"), tmp_path)
    assert resumed.code == 0, resumed.output
    assert "note: resumes from run/checkpoints/000001-round-" in resumed.output
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize("by", ["SIGHUP", "stop file"])
def test_other_requests_to_stop(tmp_path: Path, by: str) -> None:
    with running(train_command(*ONE_RANK, *ENDLESS), tmp_path) as (process, _):
        if by == "SIGHUP":  # to the whole group, as when a terminal is closed
            os.killpg(process.pid, signal.SIGHUP)
        else:
            (tmp_path / "run" / "stop").touch()
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 75, output
    assert facts(tmp_path / "run")["result"]["stop"] == "interrupted"
    assert any(tmp_path.glob("run/checkpoints/*/manifest.json"))


def test_without_a_terminal_that_may_end(tmp_path: Path) -> None:
    """nohup lets a process ignore the end of its terminal."""
    with running(["nohup", *train_command(*ONE_RANK, *ENDLESS)], tmp_path) as (process, _):
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        assert any(line.startswith("round 30 ") for line in process.stdout)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    command = train_command(*ONE_RANK, *ENDLESS, "algorithm.updates_per_round=100000")
    with running(command, tmp_path, until="round 0 ") as (process, _):
        process.send_signal(signal.SIGQUIT)
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 75
    assert output.endswith("stopped at once, without a checkpoint\n")


def test_a_run_outlives_whoever_reads_it(tmp_path: Path) -> None:
    command = shlex.join(train_command(*ONE_RANK, *SMALL, "run.directory=run"))
    done = run(["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"], tmp_path)
    assert (done.code, len(done.output.splitlines())) == (0, 1), done.output
    assert (tmp_path / "run" / "model" / "config.json").exists()
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert re.search(r"round 3 \(100 %\); .*; trainer 0: batch ", log)
    assert "ended: budget=3rounds reached" in log


def test_a_directory_has_one_writer_and_an_unfinished_run_is_never_lost(tmp_path: Path) -> None:
    with running(train_command(*ONE_RANK, *ENDLESS), tmp_path) as (process, _):
        rank0 = next(rank for rank in psutil.Process(process.pid).children() if rank.environ()["RANK"] == "0")
        refused = run(train_command(*ONE_RANK, *SMALL, "run.directory=run", "run.unfinished=archive"), tmp_path)
        assert refused.code == 2
        (line,) = errors(refused.output)
        assert line.startswith(f"error: run.directory=run: is being written by process {rank0.pid} on ")
    rows = metrics(tmp_path / "run")
    refused = run(train_command(*ONE_RANK, *SMALL, "run.directory=run"), tmp_path)
    assert refused.code == 2
    (line,) = errors(refused.output)
    assert line.startswith("error: run.directory=run: holds a run that has not ended; ")
    done = run(train_command(*ONE_RANK, *SMALL, "run.directory=run", "run.unfinished=archive"), tmp_path)
    assert done.code == 0, done.output
    assert metrics(tmp_path / "run.archived-1")[: len(rows)] == rows
    assert facts(tmp_path / "run")["result"]["stop"] == "budget=3rounds reached"


def test_a_stop_file_that_is_there_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job may be warned before its ranks are up."""
    (tmp_path / "stop").touch()
    monkeypatch.setenv("ADLOCO_STOP_FILE", "stop")
    done = run(train_command(*ONE_RANK, *SMALL, "run.directory=run"), tmp_path)
    assert done.code == 75, done.output
    assert "stopped: interrupted in round 1" in done.output
    assert {row["round"] for row in metrics(tmp_path / "run")} == {0}
    assert facts(tmp_path / "run")["result"]["rounds"] == 0


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("options", "detail"), [("ro", "is not a directory that can be written"), ("size=64k", "MB are free")]
)
def test_a_read_only_or_full_file_system(tmp_path: Path, options: str, detail: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
    try:
        done = run(train_command(*ONE_RANK, *SMALL, "run.directory=disk/run"), tmp_path)
        assert done.code == 2
        (line,) = errors(done.output)
        assert line.startswith("error: run.directory=disk/run: ")
        assert detail in line
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
