"""Runs whose workers span two ranks: the model that they leave, and what becomes of them when they are disturbed."""

import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.clocks import without_clocks
from helpers.commands import FOUR_TRAINERS, SMALL, metrics, run, running, train_command, use, wait_until

SETTINGS = (
    *SMALL, *FOUR_TRAINERS, "cluster.threads_per_rank=1", "precision=fp64",
    "pool.trainers=2", "pool.workers_per_trainer=1", "merge.every_rounds=4", "budget=10rounds",
    "algorithm.updates_per_round=4", "checkpoint.every=1rounds", "checkpoint.keep_last=9", "run.directory=run",
    "batching.request=norm_test", "batching.capacity=4096", "+model.overrides.vocab_size=260",
    "run.unfinished=resume",
)  # fmt: skip
MODEL = "run/model/model.safetensors"
PARTS = ("--nproc-per-node", "4", "pool.ranks_per_worker=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(train_command(*SETTINGS, *PARTS), folder)
    assert done.code == 0, done.output
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / MODEL)


def rows(folder: Path) -> list[dict[str, object]]:
    return without_clocks(metrics(folder / "run"))


def test_the_model_is_the_one_that_whole_workers_leave(undisturbed: Path, tmp_path: Path) -> None:
    done = run(train_command(*SETTINGS, "--nproc-per-node", "2"), tmp_path)
    assert done.code == 0, done.output
    ours, theirs = weights(undisturbed), weights(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-11, msg=name)
    names = [{path.name for path in (folder / "run" / "model").iterdir()} for folder in (undisturbed, tmp_path)]
    assert names[0] == names[1]
    configs = [(folder / "run" / "model" / "config.json").read_text() for folder in (undisturbed, tmp_path)]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(undisturbed / "run" / "model", dtype=torch.float64)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, ours[loaded.all_tied_weights_keys.get(name, name)])
    evaluated = [use("evaluate.py", "run", cwd=folder) for folder in (undisturbed, tmp_path)]
    assert evaluated[0].code == 0, evaluated[0].output
    assert evaluated[0].output.splitlines()[-1] == evaluated[1].output.splitlines()[-1]
    generated = use("generate.py", "run", "def ", "--tokens", "5", cwd=undisturbed)
    assert (generated.code, "def " in generated.output) == (0, True), generated.output
    (last,) = [row for row in metrics(undisturbed / "run") if row["round"] == 10]
    assert last["ranks"] == [0, 1, 2, 3]


def test_a_lost_rank_of_a_worker_is_started_again(undisturbed: Path, tmp_path: Path) -> None:
    with running(train_command(*SETTINGS, *PARTS, "--max-restarts", "1"), tmp_path, "round 3 ") as (process, output):
        wait_until(lambda: any(tmp_path.glob("run/checkpoints/*/manifest.json")), lambda: output)
        ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(process.pid).children()}
        ranks["3"].send_signal(signal.SIGKILL)
        output += process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert output.count("note: resumes from run/checkpoints/") == 1
    assert rows(tmp_path) == rows(undisturbed)
    for name, tensor in weights(undisturbed).items():
        assert torch.equal(weights(tmp_path)[name], tensor), name


def test_a_damaged_part_is_named_and_the_checkpoint_before_is_taken(undisturbed: Path, tmp_path: Path) -> None:
    with running(train_command(*SETTINGS, *PARTS), tmp_path, "round 5 ") as (process, output):
        wait_until(lambda: len(list(tmp_path.glob("run/checkpoints/*/manifest.json"))) > 1, lambda: output)
        ranks = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        psutil.wait_procs(ranks, timeout=15)
    newest = max(path.parent for path in tmp_path.glob("run/checkpoints/*/manifest.json"))
    part = next(newest.glob("trainer-*-part-2-of-2.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    again = run(train_command(*SETTINGS, "--nproc-per-node", "2"), tmp_path)
    assert again.code == 0, again.output
    assert f"checkpoint {newest.name} is skipped: {part.name}: does not fit its digest" in again.output
    assert "resumes with pool.ranks_per_worker=1 instead of 2" in again.output
    for name, tensor in weights(undisturbed).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-11, msg=name)
