"""Sweeps from the command line: every combination a run of its own."""

import csv
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

from helpers.commands import (
    FOUR_TRAINERS,
    ONE_RANK,
    ROOT,
    SMALL,
    documented,
    environment,
    facts,
    run,
    torchrun_command,
    train_command,
)

SWEPT = (
    "--nproc-per-node",
    "2",
    *SMALL,
    *FOUR_TRAINERS,
    "merge=none",
    "pool.trainers=1,2",
    "pool.workers_per_trainer=1,2",
)
"""Two by two, of which one leaves a rank idle, which its ranks refuse."""


def table(folder: Path) -> list[dict[str, Any]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_run_fails_alone_and_finished_ones_are_not_repeated(tmp_path: Path) -> None:
    done = run(train_command("-m", "--jobs", "2", *SWEPT, "hydra.sweep.dir=grid"), tmp_path)
    assert done.code == 1, done.output
    rows = {(row["pool.trainers"], row["pool.workers_per_trainer"]): row for row in table(tmp_path / "grid")}
    states = {point: row["state"] for point, row in rows.items()}
    assert states == {("1", "1"): "failed", ("1", "2"): "finished", ("2", "1"): "finished", ("2", "2"): "finished"}
    for (trainers, workers), row in rows.items():
        directory = tmp_path / "grid" / f"pool.trainers={trainers},pool.workers_per_trainer={workers}"
        assert row["directory"] == str(directory.relative_to(tmp_path))
        if row["state"] == "failed":
            assert not directory.exists()
            continue
        result = facts(directory)["result"]
        saved = next(candidate for candidate in result["candidates"] if candidate["name"] == result["saved"])
        assert float(row["loss"]) == saved["validation_loss"]
        assert (int(row["rounds"]), int(row["tokens"])) == (3, result["tokens"])
        assert facts(directory)["settings"]["pool"]["trainers"] == int(trainers)
        assert facts(directory)["cluster"]["ranks"][0]["cores"] == max(1, (os.cpu_count() or 1) // 2), (
            "half the machine"
        )
    (detail,) = [line for line in done.output.splitlines() if line.startswith("failed: ")]
    log = tmp_path / "grid" / "pool.trainers=1,pool.workers_per_trainer=1.log"
    assert detail.startswith("failed: pool.trainers=1,pool.workers_per_trainer=1: error: pool.trainers=1")
    assert detail.endswith(f"log: {log.relative_to(tmp_path)}")
    assert "leave some of 2 ranks idle" in log.read_text()

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "grid").glob("*/run.json")}
    again = run(train_command("-m", *SWEPT, "hydra.sweep.dir=grid"), tmp_path)
    assert again.code == 1
    assert "sweep of 4 runs, 3 of them finished before" in again.output
    assert len(table(tmp_path / "grid")) == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before

    other = run(train_command("-m", *SWEPT, "hydra.sweep.dir=grid", "budget=2rounds"), tmp_path)
    assert other.code == 2
    assert "holds a finished run with budget=3rounds instead of 2rounds; set another hydra.sweep.dir" in other.output


def test_the_documented_sweep_is_six_runs_that_differ(tmp_path: Path) -> None:
    words = documented("docs/guide/sweeps.md", "python launch/train.py -m inner.lr")
    small = (*SMALL, "budget=2rounds", "run.root=.")
    done = run(train_command(*words[2:], "--jobs", "2", *ONE_RANK, *small), tmp_path)
    assert done.code == 0, done.output
    assert "no effect" not in done.output
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("sweep_lr_wire-")
    found = {(row["inner.lr"], row["wire"]) for row in table(folder) if row["state"] == "finished"}
    assert found == set(itertools.product(("0.0025", "0.005", "0.01"), ("fp32", "adaptive")))
    settings = [facts(path.parent)["settings"] for path in folder.glob("*/run.json")]
    assert {(one["inner"]["lr"], one["wire"]["format"]) for one in settings} == set(
        itertools.product((2.5e-3, 5e-3, 1e-2), ("fp32", "adaptive"))
    )
    assert len({row["loss"] for row in table(folder)}) == 6


def test_the_documented_sweep_over_eta_and_n_gives_four_results(tmp_path: Path) -> None:
    words = documented("docs/guide/sweeps.md", "python launch/train.py -m experiment=paper data=python_stdlib")
    quick = ("evaluation.every=null", "evaluation.final_sequences=8", "tracking=none", "run.report=false")
    done = run(train_command(*words[2:], *quick, "--jobs", "2", *ONE_RANK, "hydra.sweep.dir=grid"), tmp_path)
    assert done.code == 0, done.output
    assert "no effect" not in done.output
    rows = table(tmp_path / "grid")
    points = {(row["batching.eta"], row["batching.switch_n"]) for row in rows}
    assert points == set(itertools.product(("0.3", "0.5"), ("1.5", "3")))
    assert len({(row["loss"], row["tokens"]) for row in rows}) == 4


def test_two_sweeps_at_once(tmp_path: Path) -> None:
    """Neither ports nor directories collide, though both start in one second and sweep the same settings."""
    sweeps = [
        subprocess.Popen(
            train_command("-m", *ONE_RANK, *SMALL, f"seed={seed}", "inner.lr=5e-4,1e-3", "budget=1rounds"),
            cwd=tmp_path,
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in sweeps]
    assert [process.returncode for process in sweeps] == [0, 0], "\n".join(outputs)
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    seeds = set()
    for folder in folders:
        assert [row["state"] for row in table(folder)] == ["finished", "finished"]
        seeds |= {facts(path.parent)["settings"]["seed"] for path in folder.glob("*/run.json")}
    assert seeds == {1, 2}


def test_a_sweep_under_torchrun_is_refused_on_every_rank(tmp_path: Path) -> None:
    standalone = ("--standalone", "--nproc-per-node", "2")
    done = run(torchrun_command("-m", "inner.lr=5e-4,1e-3", torchrun=standalone), tmp_path, timeout_seconds=60)
    assert done.code != 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert line.endswith(f"start it without torchrun: python {ROOT}/launch/train.py -m inner.lr=5e-4,1e-3")
    assert list(tmp_path.iterdir()) == []
