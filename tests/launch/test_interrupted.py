"""Runs that are killed, restarted, or cannot write: they resume from checkpoints, and end as if nothing had been."""

import hashlib
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from helpers.clocks import without_clocks
from helpers.commands import (
    FOUR_TRAINERS,
    SMALL,
    facts,
    metrics,
    run,
    running,
    torchrun_command,
    train_command,
    wait_until,
)

SETTINGS = (
    *SMALL, *FOUR_TRAINERS, "pool.trainers=3", "merge.every_rounds=4", "budget=16rounds",
    "algorithm.updates_per_round=8", "checkpoint.every=1rounds", "batching.capacity=4096", "run.directory=run",
    "run.unfinished=resume",
    "wire=slow_link", "wire.fragments=2", "wire.delay_updates=3",
)  # fmt: skip
"""Trainers merge, and averages travel at most times."""
MODEL = "run/model/model.safetensors"


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()


def rows(folder: Path) -> list[dict[str, object]]:
    return without_clocks(metrics(folder / "run"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(train_command(*SETTINGS), folder)
    assert done.code == 0, done.output
    return folder


def kill(folder: Path, whom: str, until: str, *options: str, how: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
    """Start the run, and end the driver or a rank when a line begins with `until` and a checkpoint is whole, for they
    are written while rounds go on; exit code and output."""
    with running(train_command(*SETTINGS, *options), folder, until) as (process, output):
        wait_until(lambda: any(folder.glob("run/checkpoints/*/manifest.json")), lambda: output)
        ranks = psutil.Process(process.pid).children()
        victims = {rank.environ()["RANK"]: rank for rank in ranks} | {"driver": psutil.Process(process.pid)}
        victims[whom].send_signal(how)
        output += process.communicate(timeout=120)[0]
        psutil.wait_procs(ranks, timeout=15)
        assert not any(rank.is_running() for rank in ranks)
    return process.returncode, output


@pytest.mark.parametrize(("whom", "until"), [("driver", "round 6 "), ("0", "before round 5")])
def test_killed_at_any_moment_it_ends_with_the_same_weights(
    undisturbed: Path, tmp_path: Path, whom: str, until: str
) -> None:
    kill(tmp_path, whom, until)
    again = run(train_command(*SETTINGS), tmp_path)
    assert again.code == 0, again.output
    assert "note: resumes from run/checkpoints/" in again.output
    assert digest(tmp_path) == digest(undisturbed)
    assert rows(tmp_path) == rows(undisturbed)
    detail = facts(tmp_path / "run")
    assert len(detail["resumed"]) == 1
    assert {key: value for key, value in detail["result"].items() if key not in ("seconds", "bytes_sent")} == {
        key: value
        for key, value in facts(undisturbed / "run")["result"].items()
        if key not in ("seconds", "bytes_sent")
    }


def test_a_lost_rank_is_started_again(undisturbed: Path, tmp_path: Path) -> None:
    code, output = kill(tmp_path, "1", "round 3 ", "--max-restarts", "2")
    assert code == 0, output
    assert output.count("note: resumes from run/checkpoints/") == 1
    assert digest(tmp_path) == digest(undisturbed)
    assert rows(tmp_path) == rows(undisturbed)


def test_torchrun_itself_starts_a_lost_rank_again(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that kills itself in its first start, in the outer step of round 4."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1' and os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n"
        "    from adloco_dist.averaging.outer_step import OuterStep\n"
        "    start, steps = OuterStep.start, []\n"
        "    def deadly(trainer, *rest, **named):\n"
        "        steps.append(trainer.id)\n"
        "        if len(steps) == 8:\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return start(trainer, *rest, **named)\n"
        "    OuterStep.start = deadly\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    refused = run(torchrun_command(*SETTINGS, torchrun=options), tmp_path)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes" in refused.output
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    done = run(torchrun_command(*SETTINGS, torchrun=options), tmp_path)
    assert done.code == 0, done.output
    assert "note: resumes from run/checkpoints/" in done.output
    assert digest(tmp_path) == digest(undisturbed)


def test_resuming_with_other_settings(tmp_path: Path) -> None:
    kill(tmp_path, "driver", "round 3 ", how=signal.SIGINT)
    refused = run(train_command(*SETTINGS, "model=tiny"), tmp_path)
    assert refused.code == 2
    assert "was trained with model." in refused.output
    resumed = run(train_command(*SETTINGS, "budget=4rounds", "inner.lr=1e-4"), tmp_path)
    assert resumed.code == 0, resumed.output
    assert "note: resumes with inner.lr=0.0001 instead of 0.0003" in resumed.output
    finished = run(train_command(*SETTINGS), tmp_path)
    assert finished.code == 0
    assert "note: run.directory=run holds a run that has ended" in finished.output


@pytest.mark.needs("root")
def test_a_disk_that_fills_up_costs_checkpoints_not_the_run(undisturbed: Path, tmp_path: Path) -> None:
    """There is room for the first checkpoint alone."""
    disk = tmp_path / "run"
    disk.mkdir()
    size = sum(path.stat().st_size for path in (undisturbed / "run").rglob("*") if path.is_file())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.1)}", "tmpfs", str(disk)], check=True)
    try:
        done = run(train_command(*SETTINGS), tmp_path)
        assert done.code == 0, done.output
        assert "could not be written, the newest whole one is 00000" in done.output
        assert "No space left on device" in done.output
        assert digest(tmp_path) == digest(undisturbed)
        assert rows(tmp_path) == rows(undisturbed)
        assert len(list(disk.glob("checkpoints/*"))) == 1, "what could not be completed takes no room"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
