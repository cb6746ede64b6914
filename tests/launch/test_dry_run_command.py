"""Dry runs from the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import (
    FOUR_TRAINERS,
    PATIENT,
    ROOT,
    SMALL,
    documented,
    environment,
    errors,
    run,
    torchrun_command,
    train_command,
)

SCREEN_COLUMNS, SCREEN_LINES = 160, 50
"""Of a terminal that fills a screen."""
WITHOUT_MATRICES = """
import torch
from torch.utils.data import TensorDataset
from adloco_dist.launch import launch

if __name__ == "__main__":
    rows = TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    launch(model=lambda: torch.nn.Linear(4, 2), data=lambda: (rows, rows),
           loss=lambda module, batch: (torch.nn.functional.cross_entropy(module(batch[0]), batch[1]), len(batch[1])))
"""


def test_dry_run_plans_and_trains_nothing(tmp_path: Path) -> None:
    done = run(
        train_command(
            "--dry-run", "--nnodes", "2", "--nproc-per-node", "4", *SMALL, *FOUR_TRAINERS, "pool.workers_per_trainer=4"
        ),
        tmp_path,
    )
    assert done.code == 0, done.output
    for words in ("117,120 parameters", "{0-3}", "{4-7}", "nothing was trained"):
        assert words in done.output
    assert list(tmp_path.iterdir()) == []
    under_torchrun = run(
        torchrun_command("--dry-run", *SMALL, PATIENT, torchrun=("--standalone", "--nproc-per-node", "2")), tmp_path
    )
    assert under_torchrun.code == 0, under_torchrun.output
    assert under_torchrun.output.count("nothing was trained") == 1
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_a_model_that_does_not_fit_here(tmp_path: Path) -> None:
    """Whose weights alone would take 276 GB."""
    command = documented("docs/guide/gpus.md", "python launch/train.py --dry-run")[2:]
    with subprocess.Popen(
        train_command(*command), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    assert usage.ru_maxrss * 1024 < 2e9
    assert (
        "inner optimizer: muon for 99% of the elements, adamw for the rest; the peak rate of one worker is " in output
    )
    assert "model: 68,976,648,192 parameters; one flat vector is 34.5 GB on each of 8 ranks" in output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    assert [row[0] for row in cells if row and row[0] == "0-15"] == ["0-15"]
    predicted = [row[0] for row in cells if len(row) == 7 and row[1].isdecimal()]
    assert predicted == ["2", "4", "8", "16", "32", "64"]
    assert list(tmp_path.iterdir()) == []


def test_the_first_screen_of_a_dry_run_answers_for_a_model_that_is_too_large(tmp_path: Path) -> None:
    done = run(train_command("--dry-run", "--nnodes", "4", "--nproc-per-node", "8", "model=llama_7b"), tmp_path)
    assert done.code == 0, done.output
    lines = done.output.splitlines()
    screen = lines[:12]
    assert sum(-(-len(line) // SCREEN_COLUMNS) for line in lines) <= SCREEN_LINES, "all of it can be seen at one time"
    (ROOT / "build" / "screenshots").mkdir(parents=True, exist_ok=True)
    (ROOT / "build" / "screenshots" / "dry-run.txt").write_text(done.output, encoding="utf-8")
    memory, link, gain, tables = [
        line for line in screen if line.startswith(("memory: ", "link, with ", "gain, with ", "tables: "))
    ]
    assert memory.startswith("memory: it does not fit: each rank holds ")
    assert "set pool.ranks_per_worker=" in memory and "on the CPU, a node holds " in memory
    assert "Mbit/s" in link and "the progress of " in gain
    assert tables == "tables: of the settings as they are given"
    columns = next(line for line in lines if "MB of averages inside" in line)
    assert "MB a node sends to" in columns


@pytest.mark.parametrize("options", [["--dry-run"], ["--nproc-per-node", "1", "run.directory=run"]])
def test_a_model_in_which_muon_has_nothing_to_update_is_refused(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text(WITHOUT_MATRICES, encoding="utf-8")
    done = run([sys.executable, "flat.py", *options], tmp_path)
    assert done.code == 2, done.output
    (line,) = errors(done.output)
    assert "inner.optimizer=muon: " in line
    assert "no matrix that is trained lies between its input and its output; use inner=adamw" in line
    assert not (tmp_path / "run").exists()


def test_dry_run_refuses_a_shape_that_ranks_cannot_share(tmp_path: Path) -> None:
    odd = ("model=causal", "model.architecture=gpt2", "+model.overrides.n_embd=66", "+model.overrides.n_head=6")
    done = run(train_command("--dry-run", "--nproc-per-node", "4", *odd, "pool.ranks_per_worker=4"), tmp_path)
    assert done.code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("error: pool.ranks_per_worker=4: ")
    assert "has no dimension that 4 ranks can share evenly" in line
