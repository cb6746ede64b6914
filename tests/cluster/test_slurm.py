"""A real Slurm of two hosts: batch jobs over both, a job that meets its time limit, and a sweep of jobs."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import FOUR_TRAINERS, ROOT, SLOW_SECONDS, SMALL, documented
from helpers.hosts import Host, hosts
from helpers.slurm import Slurm, slurm

TINY_JOB = (
    "--nproc-per-node",
    "1",
    *SMALL,
    *FOUR_TRAINERS,
    "merge=none",
    "pool.trainers=2",
    "pool.workers_per_trainer=2",
)

pytestmark = pytest.mark.needs("slurm")


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Slurm, list[Host]]]:
    directory = tempfile.TemporaryDirectory(prefix="slurm")  # a short path: sockets lie in it
    with directory as short, hosts(2) as nodes, slurm(nodes, Path(short) / "s") as running:
        yield running, nodes


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user's working copy holds, with runs of its own, once slurm/site.env was read."""
    for name in ("launch", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    read = ["bash", "-c", "source slurm/site.env && env -0"]
    lines = subprocess.run(read, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split("\0")
    for name, _, value in (line.partition("=") for line in lines if line.startswith("SBATCH_")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ADLOCO_PYTHON", sys.executable)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return tmp_path


def facts(directory: Path) -> dict:
    return json.loads((directory / "run.json").read_text())


def test_a_batch_job_trains_over_both_hosts(cluster: tuple[Slurm, list[Host]], checkout: Path) -> None:
    running, nodes = cluster
    command = documented("docs/guide/slurm.md", "sbatch")
    job_id = running.sbatch([*command[1:], *TINY_JOB], checkout)
    (job,) = running.wait(job_id, timeout_seconds=SLOW_SECONDS)
    log = (checkout / f"adloco-{job_id}.log").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log + running.logs()
    assert job["NumCPUs"] == "16", "both hosts' CPUs, all of them"
    run = checkout / "runs" / f"slurm-{job_id}"
    found = facts(run)
    assert found["cluster"]["slurm_job"] == str(job_id)
    assert [rank["host"] for rank in found["cluster"]["ranks"]] == [host.name for host in nodes]
    assert [rank["interface"] for rank in found["cluster"]["ranks"]] == ["eth0", "eth0"]
    assert [link["nodes"] for link in found["cluster"]["links"]] == [[0, 1]]
    assert found["layout"]["workers"] == {"0": [[0], [1]], "1": [[0], [1]]}, "trainers average over the two"
    assert found["result"]["stop"] == "budget=3rounds reached"
    assert {path.name for path in (run / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    assert log.count("ended: budget=3rounds reached") == 2, "each host tells it"
    assert "Traceback" not in log
    assert not list(checkout.glob(".adloco-*")), "no flag is left"


def test_a_job_trains_a_script_of_ones_own_over_both_hosts(
    cluster: tuple[Slurm, list[Host]], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, nodes = cluster
    (checkout / "my_script.py").write_bytes((ROOT / "tests" / "helpers" / "own_script.py").read_bytes())
    monkeypatch.setenv("ADLOCO_SCRIPT", "my_script.py")
    pool = ("pool.trainers=2", "pool.workers_per_trainer=2", "algorithm.updates_per_round=4", "merge.every_rounds=2")
    more = (
        "--nproc-per-node", "1", "budget=4rounds", "evaluation.every=null", "tracking=none",
        "run.report=false",
    )  # fmt: skip
    job_id = running.sbatch(["--nodes", "2", "slurm/train.sbatch", *pool, *more], checkout)
    (job,) = running.wait(job_id, timeout_seconds=SLOW_SECONDS)
    log = (checkout / f"adloco-{job_id}.log").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log + running.logs()
    found = facts(checkout / "runs" / f"slurm-{job_id}")
    assert found["command"].split()[0] == "my_script.py"
    assert found["result"]["stop"] == "budget=4rounds reached"
    assert len(found["merges"]) == 1
    assert [rank["host"] for rank in found["cluster"]["ranks"]] == [host.name for host in nodes]


def test_a_job_that_meets_its_time_limit_stops_cleanly_and_is_requeued(
    cluster: tuple[Slurm, list[Host]], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the second time it has been requeued as often as it may."""
    monkeypatch.setenv("ADLOCO_MAX_REQUEUES", "1")
    running, _ = cluster
    limit = ["--time", "1", "--signal", "B:USR1@40"]
    endless = [*TINY_JOB, "budget=1000000rounds"]
    job_id = running.sbatch([*limit, "--nodes", "2", "slurm/train.sbatch", *endless], checkout)
    (job,) = running.wait(job_id, timeout_seconds=SLOW_SECONDS)
    log = (checkout / f"adloco-{job_id}.log").read_text()
    assert (job["Restarts"], job["ExitCode"]) == ("1", "75:0"), log + running.logs()
    assert log.count("time limit: requeued (0 times before)") == 1
    run = facts(checkout / "runs" / f"slurm-{job_id}")
    assert run["result"]["stop"] == "interrupted"
    if "checkpoint: " in log.partition("time limit: ")[0]:  # a slow machine may be warned before its first round
        (second,) = run["resumed"]
        assert f"note: resumes from runs/slurm-{job_id}/checkpoints/{second['checkpoint']}" in log
    assert "Traceback" not in log


def test_a_job_that_is_asked_to_end_stops_cleanly(cluster: tuple[Slurm, list[Host]], checkout: Path) -> None:
    """scancel, or a preemption: SIGTERM to the steps; it is not requeued. What it had of the hosts until then."""
    running, _ = cluster
    asked = ("--nodes", "2", "--cpus-per-task", "3")
    job_id = running.sbatch([*asked, "slurm/train.sbatch", *TINY_JOB, "budget=1000000rounds"], checkout)
    log = checkout / f"adloco-{job_id}.log"
    while "round 2 " not in (log.read_text() if log.exists() else ""):
        (job,) = running.jobs(job_id)
        assert job["JobState"] in ("PENDING", "RUNNING"), log.read_text() + running.logs()
    step = running.run(["scontrol", "--oneliner", "show", "step", f"{job_id}.0"])
    assert " CPUs=6 " in step, "of both hosts, for one agent each"
    running.run(["scancel", str(job_id)])
    (job,) = running.wait(job_id, timeout_seconds=60)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert facts(checkout / "runs" / f"slurm-{job_id}")["result"]["stop"] == "interrupted", log.read_text()


def test_a_sweep_is_one_job_for_each_run(cluster: tuple[Slurm, list[Host]], checkout: Path) -> None:
    running, nodes = cluster
    tiny = [setting for setting in TINY_JOB if setting != "algorithm=diloco"]  # whose momentum no sparse wire takes
    arguments = [*tiny, "budget=1rounds", "hydra.launcher.nodes=2", "hydra.launcher.timeout_min=5"]
    command = running.host.command([*documented("docs/guide/slurm.md", "slurm/sweep"), *arguments])
    environment = os.environ | running.environment
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + running.logs()
    runs = [facts(path.parent) for path in checkout.glob("runs/sweep_*/*/run.json")]
    points = {(run["settings"]["inner"]["lr"], run["settings"]["wire"]["format"]) for run in runs}
    assert points == {(2.5e-3, "fp32"), (2.5e-3, "adaptive"), (5e-3, "fp32"), (5e-3, "adaptive")}
    assert len({run["cluster"]["slurm_job"] for run in runs}) == 4
    assert all(run["cluster"]["hosts"] == [host.name for host in nodes] for run in runs)
    assert done.stdout.count("finished") >= 4
    (table,) = checkout.glob("runs/sweep_*/sweep.csv")
    assert table.read_text().count("finished") == 4
