"""The commands in a shell where another launcher has left its variables, or under one."""

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.commands import FOUR_TRAINERS, ONE_RANK, SMALL, run, train_command

pytestmark = pytest.mark.stranger
OLD_RANK = {
    "TORCHELASTIC_RUN_ID": "job", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_gone/attempt_0/1/error.json",
}  # fmt: skip

IMPATIENT = """
import os
if "RANK" in os.environ:
    from adloco_dist.cluster import runtime
    runtime.STORE_SECONDS = 1.0
"""


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"TORCHELASTIC_RUN_ID": "job"}, "TORCHELASTIC_RUN_ID=job: this is what torchrun gives its ranks, but "),
        (OLD_RANK, "MASTER_ADDR=localhost, MASTER_PORT=1: cannot be reached from"),
        ({"GLOO_SOCKET_IFNAME": "nonsense0"}, "GLOO_SOCKET_IFNAME=nonsense0: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, variables: Mapping[str, str], line: str) -> None:
    """By the driver, by an old rank, by a new one; tests/unit/launch/test_launchers.py has the others."""
    done = run(train_command(*ONE_RANK, *SMALL), tmp_path, variables=variables)
    assert done.code == 2, done.output
    (error,) = [printed for printed in done.output.splitlines() if printed.startswith("error: ")]
    assert error.startswith(f"error: {line}")
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_old_rank_whose_others_never_come_ends_with_one_line(tmp_path: Path, rank: str) -> None:
    """Where the store is not the agent's, rank 0 opens one itself, and waits there."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = str(taken.getsockname()[1])
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    left = {**OLD_RANK, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    done = run(train_command(*SMALL), tmp_path, variables={**left, "PYTHONPATH": str(tmp_path)})
    assert done.code == 1, done.output
    (error,) = [printed for printed in done.output.splitlines() if printed.startswith("error: ")]
    assert error.startswith(f"error: MASTER_ADDR=localhost, MASTER_PORT={port}: 2 ranks did not meet there (")
    assert error.endswith("unset TORCHELASTIC_RUN_ID")
    assert "Traceback" not in done.output


def test_a_sweep_under_another_launcher_is_refused(tmp_path: Path) -> None:
    done = run(train_command("-m", "seed=1,2"), tmp_path, variables={"RANK": "1", "WORLD_SIZE": "4"})
    assert done.code == 2, done.output
    assert "error: WORLD_SIZE=4, RANK=1: another launcher started 4 of these" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_reported_whatever_rank_the_shell_was(tmp_path: Path) -> None:
    done = run(train_command("inner.lrr=1"), tmp_path, variables={"LOCAL_RANK": "3"})
    assert done.code == 2
    assert "error: inner.lrr=1: no such setting" in done.output


def trained(directory: Path, variables: Mapping[str, str]) -> str:
    """The digest of the model that a small run leaves."""
    done = run(train_command(*ONE_RANK, *SMALL, *FOUR_TRAINERS, "run.directory=run"), directory, variables=variables)
    assert done.code == 0, done.output
    assert "Traceback" not in done.output
    (weights,) = (directory / "run" / "model").glob("*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


HARMLESS: list[dict[str, str]] = [
    {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "nonsense", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
    {"TORCHELASTIC_MAX_RESTARTS": "many", "TORCHELASTIC_RESTART_COUNT": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
     "TORCHELASTIC_ERROR_FILE": "/gone/error.json", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGNONE"},
    {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_RDZV_ENDPOINT": "nowhere.invalid:1"},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2",
     "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPU_BIND": "none"},
    {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "ACCELERATE_MIXED_PRECISION": "fp16",
     "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DYNAMO_BACKEND": "inductor"},
    {"NCCL_SOCKET_IFNAME": "nonsense0", "NCCL_DEBUG": "nonsense", "NCCL_HOSTID": "z", "NCCL_P2P_DISABLE": "x",
     "TORCH_NCCL_ASYNC_ERROR_HANDLING": "x", "TORCH_NCCL_BLOCKING_WAIT": "x", "CUDA_VISIBLE_DEVICES": "nonsense"},
    {"HYDRA_FULL_ERROR": "1", "HYDRA_CONFIG": "x", "WANDB_MODE": "nonsense", "WANDB_RUN_ID": "///",
     "WANDB_DIR": "/nowhere", "WANDB_PROJECT": "x/y"},
    {"OMP_NUM_THREADS": "nonsense", "MKL_NUM_THREADS": "-3", "OMP_PROC_BIND": "nonsense"},
    {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "nonsense"},
]  # fmt: skip


def test_what_says_nothing_about_this_run_changes_no_bit_of_it(tmp_path: Path) -> None:
    """All at once; `trained` with one of them says which it is that does."""
    everything = {name: value for variables in HARMLESS for name, value in variables.items()}
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    plain.mkdir()
    disturbed.mkdir()
    assert trained(disturbed, everything) == trained(plain, {})
