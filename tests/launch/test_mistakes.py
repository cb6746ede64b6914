"""Mistakes of the user: one clear line, exit code 2, before any training, and nothing left behind."""

import socket
from pathlib import Path

import pytest

from helpers.commands import ONE_RANK, SMALL, Finished, run, torchrun_command, train_command
from helpers.refusals import refusal


def assert_refused(done: Finished, cwd: Path, *words: str) -> None:
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert done.code == 2, done.output
    assert len(errors) == 1, done.output
    for word in words:
        assert word in errors[0]
    assert "Traceback" not in done.output
    assert not (cwd / "runs").exists()


def test_a_mistake_ends_the_driver_with_its_line(tmp_path: Path) -> None:
    """The one real command; what else the driver refuses is tried in this process."""
    assert_refused(run(train_command("inner.lrr=1"), tmp_path), tmp_path, "no such setting", "inner.lr")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2"], ["--nnodes=2", "torchrun"]),
        (["--nnodes", "2", "--rdzv-endpoint", "node1:abc"], ["--rdzv-endpoint=node1:abc", "HOST:PORT"]),
        (["--nproc-per-node", "0"], ["--nproc-per-node=0"]),
        (["--slurm"], ["--slurm", "SLURM_JOB_ID", "srun"]),
        (["--jobs", "2"], ["--jobs=2: has no effect without -m"]),
        (["--master-port", "99999"], ["--master-port=99999"]),
        (["--nproc-per-node", "3", "pool.ranks_per_worker=2"], ["pool.ranks_per_worker=2: 3 ranks", "start 4, or"]),
        (["--nproc-per-node", "2", "pool.ranks_per_worker=4"], ["pool.ranks_per_worker=4: 2 ranks", "start 4, or"]),
        (["--dry-run", "--nproc-per-node", "8", "pool.ranks_per_worker=3"], ["8 ranks are no multiple of it; start 9"]),
        (["--rdzv-endpoint", "localhost:1"], ["--rdzv-endpoint=localhost:1: has no effect on one node"]),
        (["--join", "localhost:1"], ["--join=localhost:1: no run can be joined there", "Connection refused"]),
        (["--join", "nowhere"], ["--join=nowhere: no run can be joined there", "'nowhere' is no HOST:PORT"]),
        (["--join", "localhost:1", "--nnodes", "2"], ["--nnodes=2: has no effect with --join"]),
        (["--join-timeout", "0"], ["--join-timeout=0: must be from 1 to"]),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "localhost:1", "--master-port", "5"],
            ["--master-port=5: has no effect"],
        ),
        (
            ["--nproc-per-node", "500", "pool.trainers=4", "pool.workers_per_trainer=1"],
            ["4 workers leave some of 500 ranks idle"],
        ),
        (["--max-restarts", "2"], ["--max-restarts=2: a run that is started again must find its checkpoints"]),
        (["--nnodes", "1:2", "--rdzv-endpoint", "localhost:29599"], ["--nnodes=1:2: when a node is lost"]),
        (["--nproc-per-node", "2", "pool.trainers=1", "pool.workers_per_trainer=1"], ["2 ranks idle"]),
        (["run.directory=file/run"], ["run.directory=file/run", "not a directory"]),
        *(
            (["--nnodes", "2", "--rdzv-endpoint", endpoint], [f"--rdzv-endpoint={endpoint}: must be HOST:PORT"])
            for endpoint in ("localhost:abc", "localhost:70000", ":29500", "")
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "nosuchhost.invalid:29500"],
            ["the host nosuchhost.invalid is not known on"],
        ),
        (["-m", "batching.eta=0.5"], ["-m: no setting has several values"]),
        (["-m", "batching.etaa=0.5,0.8"], ["no such setting; did you mean batching.eta"]),
        (["-m", "batching.eta=0.5,-1"], ["batching.eta=-1.0: must be"]),
        (["-m", "batching.eta=interval(0.5,1)"], ["names no values one by one"]),
        (["-m", "inner.lr=5e-4,1e-3", "run.directory=x"], ["set hydra.sweep.dir"]),
        (["-m", "inner.lr=5e-4,1e-3", "--jobs", "999"], ["--jobs=999: must be <= "]),
        (["-m", "inner.lr=5e-4,1e-3", "--dry-run"], ["--dry-run: has no effect with -m"]),
        (["-m", "inner.lr=5e-4,1e-3", "hydra/launcher=nothing"], ["hydra/launcher=nothing: no such choice"]),
        (
            ["-m", "batching.eta=0.5,0.8", "batching.switch_n=1.5,2"],
            ["-m batching.eta=0.5,0.8: has no effect with batching.request="],
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith(("-", "run")) else "",
)
def test_mistakes_that_the_driver_sees_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.chdir(tmp_path)
    line = refusal(*arguments)
    for word in words:
        assert word in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refusal("--master-port", port)
    assert line.startswith(f"--master-port={port}: ") and "in use" in line and "another port" in line


def test_mistakes_that_the_ranks_see(tmp_path: Path) -> None:
    """Told once, whatever the number of ranks (tests/distributed/test_prepare.py has the others)."""
    arguments = ("data=text", "data.train=[nowhere/*.txt]")
    done = run(train_command(*SMALL, *arguments), tmp_path)
    assert_refused(done, tmp_path, "data.train=nowhere/*.txt", "no such file")
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_asked_for_where_there_is_none(tmp_path: Path) -> None:
    done = run(train_command(*ONE_RANK, *SMALL, "cluster.device=cuda"), tmp_path)
    assert_refused(done, tmp_path, "cluster.device=cuda", "GPU")


def test_torchrun_tells_a_mistake_once_and_does_not_hang(tmp_path: Path) -> None:
    done = run(torchrun_command("inner.lrr=1", torchrun=("--standalone", "--nproc-per-node", "2")), tmp_path)
    assert done.code != 0
    assert done.output.count("error: inner.lrr=1: no such setting") == 1


def test_a_corpus_that_differs_between_ranks(tmp_path: Path) -> None:
    """Each rank starts in a folder of its own, as on nodes without a shared file system."""
    for rank, text in enumerate(("the same text " * 500, "another text  " * 500)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "x.txt").write_text(text)
    script = f"import os; os.chdir(os.environ['RANK']); import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    (tmp_path / "apart.py").write_text(script + "\nfrom adloco_dist.launch.driver import main\nmain()\n")
    command = torchrun_command(
        *SMALL, "data=text", "data.train=[x.txt]", torchrun=("--standalone", "--nproc-per-node", "2")
    )
    command[command.index(next(word for word in command if word.endswith("train.py")))] = str(tmp_path / "apart.py")
    done = run(command, tmp_path)
    assert done.code != 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert "data.corpus=text differs between ranks" in line
    assert "rank 0" in line
    assert "rank 1" in line
    assert not (tmp_path / "0" / "runs").exists()


def test_settings_without_effect_are_named_once_before_training_and_in_the_log(tmp_path: Path) -> None:
    given = ("batching.request=none", "batching.eta=0.8", "tracking.project=mine")
    done = run(train_command("--nproc-per-node", "2", *SMALL, *given, "budget=1rounds", "run.directory=run"), tmp_path)
    assert done.code == 0, done.output
    lines = [line for line in done.output.splitlines() if "has no effect" in line or line.startswith("round ")]
    notes = [f"note: {setting}: has no effect with " for setting in given[1:]]
    assert [line[: len(note)] for line, note in zip(lines, notes, strict=False)] == notes
    assert all(line.startswith("round ") for line in lines[len(notes) :])
    logged = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert all(logged.count(note.removeprefix("note: ")) == 1 for note in notes)


def test_settings_without_effect_are_named_in_a_dry_run(tmp_path: Path) -> None:
    done = run(train_command("--dry-run", *SMALL, "batching.request=ramp", "batching.nu=3"), tmp_path)
    assert done.code == 0, done.output
    assert "note: batching.nu=3: has no effect with batching.request=ramp; it is read when " in done.output
