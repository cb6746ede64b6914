"""The files of a checkpoint. Nothing in them is ever unpickled: tensors are safetensors, the rest is JSON."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from adloco_dist.config import CheckpointSettings
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError

CHECKPOINTS_DIRECTORY = "checkpoints"
STATE_FILE = "state.json"
RECORDS_FILE = "metrics.jsonl"
NAME = re.compile(r"(\d{6,})-round-(\d+)")
"""Name of a checkpoint's directory: its number, and the rounds that were complete."""


@dataclass(frozen=True)
class Share:
    """Which part of a model a file is about: that of the rank at `index` of `size` that hold it together."""

    index: int
    size: int

    @property
    def suffix(self) -> str:
        return "" if self.size == 1 else f"-part-{self.index + 1}-of-{self.size}"

    @classmethod
    def all_of(cls, size: int) -> "list[Share]":
        return [cls(index, size) for index in range(size)]


def trainer_file(trainer: int, share: Share) -> str:
    """What holds a trainer's outer state."""
    return f"trainer-{trainer}{share.suffix}.safetensors"


def worker_file(trainer: int, worker: int, share: Share) -> str:
    """What holds one worker's inner state."""
    return f"trainer-{trainer}-worker-{worker}{share.suffix}.safetensors"


def mapped_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a part on the CPU, in mapped memory: of the file only what is looked at is read.

    Raises:
        DamagedError: it holds none, whatever its digest says; `name` is what the line calls it.
        OSError: it cannot be read.
    """
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # safetensors has errors of its own, torch of several kinds
        raise DamagedError(f"{name}: holds no tensors ({error})") from error


def number_in(name: str) -> int | None:
    """The number of the checkpoint that a directory of this name holds; None: it is called like none."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def obsolete(settings: CheckpointSettings, names: Sequence[str]) -> list[str]:
    """The names of those checkpoints, of the directories of all whole ones, that are kept no longer."""
    matches = sorted((int(match[1]), int(match[2]), name) for name in names if (match := NAME.fullmatch(name)))
    every = settings.keep_every_rounds
    return [
        name for _, rounds, name in matches[: -settings.keep_last] if every is None or rounds == 0 or rounds % every
    ]


def prune(checkpoints: Path, settings: CheckpointSettings) -> None:
    """Remove the checkpoints in a folder that are kept no longer, and what is left of older, unfinished ones."""
    numbers = {path.name: number for path in checkpoints.iterdir() if (number := number_in(path.name)) is not None}
    whole = [name for name in numbers if (checkpoints / name / MANIFEST_FILE).exists()]
    newest = max((numbers[name] for name in whole), default=0)
    unfinished = [name for name, number in numbers.items() if name not in whole and number < newest]
    for name in [*obsolete(settings, whole), *unfinished]:
        (checkpoints / name / MANIFEST_FILE).unlink(missing_ok=True)  # first: half a checkpoint must look like none
        shutil.rmtree(checkpoints / name, ignore_errors=True)
