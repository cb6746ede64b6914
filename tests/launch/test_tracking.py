"""What Weights & Biases and TensorBoard hold of real runs, read back; and runs whose tracker fails or hangs."""

import re
from pathlib import Path

import numpy as np
import psutil
import pytest

from helpers.commands import (
    FOUR_TRAINERS,
    ONE_RANK,
    facts,
    metrics,
    run,
    running,
    small_without,
    torchrun_command,
    train_command,
    wait_until,
)
from helpers.tracked import Logged, curves, logged

SETTINGS = (
    *small_without("tracking"), *FOUR_TRAINERS, "pool.trainers=2", "merge=none", "run.directory=run",
)  # fmt: skip
BOTH = ("tracking=offline", "tracking.tensorboard=true")
AXES = {"round", "updates", "pool_tokens", "bytes", "elapsed_seconds"}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with both trackers; what it printed lies beside it."""
    folder = tmp_path_factory.mktemp("tracked")
    named = ("tracking.project=mine", "tracking.group=ours")
    variables = {"WANDB_TAGS": "short,nano"}
    done = run(train_command(*ONE_RANK, *SETTINGS, *BOTH, *named), folder, variables=variables)
    assert done.code == 0, done.output
    (folder / "terminal").write_text(done.output)
    return folder / "run"


def recorded(directory: Path, name: str) -> dict[int, dict[int, float]]:
    """A number of metrics.jsonl, by trainer and round."""
    found: dict[int, dict[int, float]] = {}
    for row in metrics(directory):
        if name in row:
            found.setdefault(row["trainer"], {})[row["round"]] = row[name]
    return found


def in_weights_and_biases(part: Logged, name: str) -> dict[int, float]:
    return {values["_step"]: values[name] for values in part.history if name in values}


def totals(directory: Path) -> list[dict[str, float]]:
    """The axes at the end of every round, added up from metrics.jsonl."""
    added: list[dict[str, float]] = []
    for row in metrics(directory):
        if not added or added[-1]["round"] != row["round"]:
            last = added[-1] if added else {"updates": 0, "bytes": 0}
            updates = last["updates"] + row.get("updates", 0)
            added.append({"round": row["round"], "updates": updates, "bytes": last["bytes"]})
        added[-1]["bytes"] += sum(row["bytes_sent"].values())
        added[-1] |= {"pool_tokens": row.get("pool_tokens", 0), "elapsed_seconds": row["elapsed_seconds"]}
    return added


def test_weights_and_biases_holds_the_run(tracked: Path) -> None:
    (part,) = logged(tracked)
    assert (part.run.display_name, part.run.project, part.run.run_group) == ("run", "mine", "ours")
    assert list(part.run.tags) == ["short", "nano"]
    assert {key: value for key, value in part.config.items() if key != "_wandb"} == facts(tracked)["settings"]
    assert part.steps == [0, 1, 2, 3]
    for name in ("train_loss", "validation_loss", "total_batch"):
        for trainer, values in recorded(tracked, name).items():
            assert in_weights_and_biases(part, f"trainer{trainer}/{name}") == values
    assert [{axis: values[axis] for axis in AXES} for values in part.history] == totals(tracked)
    assert part.axes == {**dict.fromkeys(AXES, ""), "*": "round"}
    result = facts(tracked)["result"]
    assert {key: part.summary[key] for key in result} == result
    assert part.exit_code == 0


def test_tensorboard_holds_the_run(tracked: Path) -> None:
    found, (part,) = curves(tracked), logged(tracked)
    for name in ("train_loss", "validation_loss", "total_batch"):
        for trainer, values in recorded(tracked, name).items():
            assert found[f"trainer{trainer}/{name}"] == {step: np.float32(value) for step, value in values.items()}
    names = {name for values in part.history for name in values if not name.startswith("_")}
    assert found.keys() == names - {"round"}
    for axis in AXES - {"round"}:
        assert found[axis] == {one["round"]: np.float32(one[axis]) for one in totals(tracked)}


def test_the_terminal_says_nothing_of_trackers_that_work(tracked: Path) -> None:
    output = (tracked.parent / "terminal").read_text()
    assert not re.search("wandb|biases|tensorboard", output, re.IGNORECASE), output


def test_jobs_of_a_sweep_share_a_group_and_differ_in_name(tmp_path: Path) -> None:
    arguments = (*small_without("tracking"), "budget=1rounds", "tracking=offline", "hydra.sweep.dir=grid")
    done = run(train_command("-m", "--jobs", "2", *ONE_RANK, *arguments, "inner.lr=1e-3,1e-4"), tmp_path)
    assert done.code == 0, done.output
    parts = [part for directory in sorted((tmp_path / "grid").glob("inner*/")) for part in logged(directory)]
    assert [part.run.display_name for part in parts] == ["inner.lr=0.0001", "inner.lr=0.001"]
    assert [part.run.run_group for part in parts] == ["grid", "grid"]
    assert len({part.run.run_id for part in parts}) == 2
    again = run(train_command("-m", *ONE_RANK, *arguments, "inner.lr=1e-3,1e-4", "tracking.group=other"), tmp_path)
    assert again.code == 0, again.output
    assert "2 of them finished before" in again.output, "who looks at a run makes it no other run"


def test_a_run_that_was_killed_resumes_its_curves(tmp_path: Path) -> None:
    """The last checkpoint is older than the last round that was logged: some rounds come twice, and are there once.

    W&B's process ends with the one that was killed, and with it what was not written yet of its file.
    """
    settings = (
        *ONE_RANK, *SETTINGS, "run.unfinished=resume", "checkpoint.every=4rounds", "batching.capacity=4096",
        "inner.schedule=constant", "inner.warmup_fraction=0",  # the budgets differ
    )  # fmt: skip
    with running(train_command(*settings, *BOTH, "budget=100000rounds"), tmp_path, "round 6 ") as (process, output):
        wait_until(lambda: any(tmp_path.glob("run/checkpoints/*/manifest.json")), lambda: output)
        # The thread of W&B starts in its own time.
        wait_until(lambda: any(tmp_path.glob("run/wandb/*.round")), lambda: output)
        (rank,) = psutil.Process(process.pid).children()
        services = rank.children()
        rank.kill()
        process.wait()
        _, alive = psutil.wait_procs(services, timeout=60)
        assert not alive, "they end by themselves"
    (mark,) = (tmp_path / "run" / "wandb").glob("*.round")
    newest, before = int(mark.read_text()), metrics(tmp_path / "run")
    budget = before[-1]["round"] + 3  # W&B's thread may be rounds behind
    done = run(train_command(*settings, *BOTH, f"budget={budget}rounds"), tmp_path)
    assert done.code == 0, done.output
    first, second = logged(tmp_path / "run")
    assert second.run.run_id == mark.stem
    assert second.steps == list(range(newest + 1, budget + 1))
    assert first.steps == list(range(newest + 1))[: len(first.steps)]
    assert len(before) > 2 * (int(facts(tmp_path / "run")["resumed"][0]["checkpoint"].split("-")[0]) + 1)
    losses = recorded(tmp_path / "run", "train_loss")[1]
    logged_losses = [in_weights_and_biases(part, "trainer1/train_loss") for part in (first, second)]
    assert all(loss == losses[step] for of_part in logged_losses for step, loss in of_part.items())
    clock = {row["round"]: np.float32(row["elapsed_seconds"]) for row in metrics(tmp_path / "run")}
    assert curves(tmp_path / "run")["elapsed_seconds"] == clock, "of the rounds that were repeated, too"


BROKEN = """
class Settings:
    def __init__(self, **settings): pass
def init(**settings):
    raise ConnectionError("no network here\\nand more about it")
"""
HANGING = "import threading\nthreading.Event().wait()\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (BROKEN, "Weights & Biases failed (ConnectionError: no network here); "),
        (HANGING, "Weights & Biases was not done 30 seconds after the end, and is left alone; "),
    ],
    ids=["raises", "hangs"],
)
def test_a_run_whose_tracker_is_broken(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, said: str
) -> None:
    (tmp_path / "wandb.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ("--standalone", *ONE_RANK)
    done = run(torchrun_command(*SETTINGS, "tracking=offline", torchrun=options), tmp_path)
    assert done.code == 0, done.output
    notes = [line for line in done.output.splitlines() if line.startswith("note: Weights & Biases")]
    assert notes == [f"note: {said}the run's own records are complete"]
    assert "Traceback" not in done.output
    assert recorded(tmp_path / "run", "train_loss") == recorded(tracked, "train_loss")
    assert facts(tmp_path / "run")["result"]["saved"] == facts(tracked)["result"]["saved"]
