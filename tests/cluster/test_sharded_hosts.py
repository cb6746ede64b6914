"""The guide's commands in small: on two hosts, two ranks each hold a worker and average with the other host."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.commands import FOUR_TRAINERS, ROOT, SLOW_SECONDS, SMALL, documented, run, train_command
from helpers.hosts import hosts, run_on
from helpers.slurm import slurm

PAGE = "docs/guide/large-models.md"
ONE_TRAINER = (
    *SMALL, *FOUR_TRAINERS, "pool.trainers=1", "pool.workers_per_trainer=2", "precision=fp64",
    "batching.request=none", "cluster.threads_per_rank=1",
)  # fmt: skip
INSTEAD = {
    "8": "2", "pool.ranks_per_worker=8": "pool.ranks_per_worker=2", "model=llama_7b": "model=nano",
    "data.sequence_length=2048": "data.sequence_length=32",
}  # fmt: skip


def in_small(command: list[str]) -> list[str]:
    return [INSTEAD.get(word, word) for word in command]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with two workers of one rank each."""
    folder = tmp_path_factory.mktemp("whole")
    alone = ("--nproc-per-node", "2", *ONE_TRAINER, "model.gradient_checkpointing=true", "run.directory=run")
    done = run(train_command(*alone), folder)
    assert done.code == 0, done.output
    return folder / "run"


def check(directory: Path, reference: Path) -> None:
    facts = json.loads((directory / "run.json").read_text())
    assert facts["cluster"]["nodes"] == [0, 0, 1, 1]
    assert facts["settings"]["pool"]["ranks_per_worker"] == 2
    assert facts["layout"]["workers"] == {"0": [[0, 1], [2, 3]]}
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(row["ranks"] == [0, 1, 2, 3] and row["workers"] == 2 for row in rows)
    found, expected = weights(directory), weights(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-11, msg=name)


@pytest.mark.needs("hosts")
def test_torchrun_on_two_hosts(on_one_host: Path, tmp_path: Path) -> None:
    with hosts(2, rate="200mbit") as nodes:
        ours = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
            "launch/train.py": [str(ROOT / "launch" / "train.py")],
            "node1:29500": [f"{nodes[0].name}:29512"],
        }
        words = [word for one in in_small(documented(PAGE, "torchrun")) for word in ours.get(one, [one])]
        done = run_on([(host, [*words, *ONE_TRAINER, "run.directory=run"]) for host in nodes], tmp_path)
        assert [code for code, _ in done] == [0, 0], "\n".join(output for _, output in done)
    (directory,) = (path.parent for path in tmp_path.glob("*/run/run.json"))
    check(directory, on_one_host)


@pytest.mark.needs("slurm")
def test_a_slurm_job_on_two_hosts(on_one_host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("launch", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("ADLOCO_PYTHON", sys.executable)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as short,
        hosts(2) as nodes,
        slurm(nodes, Path(short) / "s") as made,
    ):
        command = [*in_small(documented(PAGE, "sbatch"))[1:], "--nproc-per-node", "2", *ONE_TRAINER]
        job_id = made.sbatch(command, tmp_path)
        (job,) = made.wait(job_id, timeout_seconds=SLOW_SECONDS)
        log = (tmp_path / f"adloco-{job_id}.log").read_text()
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log + made.logs()
    check(tmp_path / "runs" / f"slurm-{job_id}", on_one_host)
