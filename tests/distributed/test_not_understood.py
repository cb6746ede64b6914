"""A checkpoint that is whole, and cannot be understood, is skipped for the one before, in agreement of all ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.run.manifest import MANIFEST_FILE, digest_of, write_manifest
from helpers.processes import run_ranks
from helpers.records import edited_json
from helpers.resuming import train_kept
from helpers.support import FOUR_TRAINERS

POOL = ("pool.trainers=2", "pool.workers_per_trainer=2", "merge=none", "checkpoint.every=1rounds", "budget=5rounds")
Change = Callable[[Path], None]


def train(runtime: Runtime, folder: str, *overrides: str) -> list[str] | str:
    """What was reported, or the mistake that all ranks raise."""
    try:
        return train_kept(runtime, folder, None, *FOUR_TRAINERS, *POOL, *overrides)["reported"]
    except SettingsError as error:
        return f"error: {error}"


def state_with(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "state.json"
        file.write_bytes(edited_json(file.read_bytes(), fields))

    return change


def content(raw: bytes, file: str = "state.json") -> Change:
    def change(folder: Path) -> None:
        (folder / file).write_bytes(raw)

    return change


def tensors(file: str, **changes: Any) -> Change:
    """One of a part's tensors becomes what a function makes of it, or is left out."""

    def change(folder: Path) -> None:
        held = load_file(folder / file)
        for name, make in changes.items():
            tensor = held.pop(name)
            if make is not None:
                held[name] = make(tensor).contiguous()
        save_file(held, folder / file)

    return change


WORKER = "trainer-1-worker-0.safetensors"
CHANGES: dict[str, tuple[Change, str]] = {
    "no state": (lambda folder: (folder / "state.json").unlink(), "state.json"),
    "a list": (content(b"[]"), "state.json"),
    "nested": (content(b'{"plan": ' + b"[" * 100_000), "state.json"),
    "no JSON": (content(b"\xff{"), "state.json"),
    "another version": (state_with(version=1), "state.json"),
    "a key is missing": (state_with(plan__batches=KeyError), "state.json"),
    "of a wrong type": (state_with(seconds="soon"), "state.json"),
    "ranks that were not there": (state_with(world_size=1), "state.json"),
    "shards of nobody": (state_with(shards={}), "state.json"),
    "records nowhere": (state_with(journal__metrics_bytes="x"), "state.json"),
    "a part is missing": (lambda folder: (folder / WORKER).unlink(), WORKER),
    "a tensor is missing": (tensors("trainer-0.safetensors", momentum=None), "trainer-0.safetensors"),
    "no tensors": (content(b"nothing", WORKER), WORKER),
}  # fmt: skip


def fitted(folder: Path) -> None:
    """A manifest that fits whatever is there."""
    files = [path for path in folder.iterdir() if path.name != MANIFEST_FILE]
    write_manifest(folder, {path.name: digest_of(path) for path in files})


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with four checkpoints, one of each start that has one to write: further ones a busy writer may let pass."""
    folder = tmp_path_factory.mktemp("ended")
    for rounds in (2, 3, 4, 5):
        (folder / "shared" / "run.json").unlink(missing_ok=True)
        run_ranks(train, [0, 0], str(folder), f"budget={rounds}rounds", "checkpoint.keep_last=9")
    return folder


def test_the_one_before_is_found_instead(ended: Path, tmp_path: Path) -> None:
    """One change for every checkpoint but the oldest, in as few starts as there are checkpoints to spoil."""
    names = list(CHANGES)
    (ended / "shared" / "run.json").unlink(missing_ok=True)
    checkpoints = sorted((ended / "shared" / "checkpoints").iterdir())
    num_spoilt = len(checkpoints) - 1
    assert num_spoilt == 3
    for start in range(0, len(names), num_spoilt):
        chosen = names[start : start + num_spoilt]
        run = tmp_path / str(start)
        shutil.copytree(ended, run)
        nonfinite = sorted((run / "shared" / "checkpoints").iterdir())[-len(chosen) :]
        for folder, name in zip(nonfinite, chosen, strict=True):
            CHANGES[name][0](folder)
            fitted(folder)
        detail = run_ranks(train, [0, 0], str(run))
        assert isinstance(detail[0], list), detail
        for folder, name in zip(nonfinite, chosen, strict=True):
            lines = [line for line in detail[0] if line.startswith(f"checkpoint {folder.name} is skipped: ")]
            assert len(lines) == 1, (name, detail[0])
            assert CHANGES[name][1] in lines[0], (name, lines)
        assert any(line.startswith("resumes from") for line in detail[0])


def test_parts_of_another_type_than_the_model_are_named_in_one_line(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "run")
    (tmp_path / "run" / "shared" / "run.json").unlink(missing_ok=True)
    for folder in (tmp_path / "run" / "shared" / "checkpoints").iterdir():
        tensors("trainer-0.safetensors", anchor=lambda tensor: tensor.float())(folder)
        fitted(folder)
    detail = run_ranks(train, [0, 0], str(tmp_path / "run"))
    assert detail[0] == detail[1]
    assert "trainer-0.safetensors: anchor is" in detail[0]
    assert "torch.float64" in detail[0]


def test_checkpoints_of_another_release_are_refused_where_there_is_no_other(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "run")
    (tmp_path / "run" / "shared" / "run.json").unlink(missing_ok=True)
    for folder in (tmp_path / "run" / "shared" / "checkpoints").iterdir():
        state_with(version=5)(folder)
        fitted(folder)
    lines = run_ranks(train, [0, 0], str(tmp_path / "run"))
    assert lines[0] == lines[1]
    assert lines[0].startswith("error: run.directory=")
    assert "its checkpoint is of version 5; this release reads version 8; resume with the release" in lines[0]


def test_checkpoints_that_are_no_directory(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "checkpoints").write_text("")
    detail = run_ranks(train, [0, 0], str(tmp_path))
    assert detail[0] == detail[1]
    assert detail[0].startswith("error: run.directory=")
    assert "cannot be read" in detail[0]
