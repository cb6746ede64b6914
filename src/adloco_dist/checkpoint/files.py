"""The files of a checkpoint. Nothing in them is ever unpickled: tensors are safetensors, the rest is JSON."""

import re
import shutil
from collections.abc import Sequence
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


def part_suffixes(size: int) -> list[str]:
    """What file names say of the parts of a model that `size` ranks hold together, by rank."""
    return [""] if size == 1 else [f"-part-{index + 1}-of-{size}" for index in range(size)]


def trainer_file(trainer: int, suffix: str) -> str:
    """Name of the file with a trainer's outer state."""
    return f"trainer-{trainer}{suffix}.safetensors"


def worker_file(trainer: int, worker: int, suffix: str) -> str:
    """Name of the file with one worker's inner state."""
    return f"trainer-{trainer}-worker-{worker}{suffix}.safetensors"


def mapped_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a file on the CPU, in mapped memory: only what is accessed is read.

    Raises:
        DamagedError: it holds no tensors, whatever its digest says; the error calls the file `name`.
        OSError: it cannot be read.
    """
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # safetensors has errors of its own, torch of several kinds
        raise DamagedError(f"{name}: holds no tensors ({error})") from error


def number_in(name: str) -> int | None:
    """The number of the checkpoint in a directory of this name; None: it is not the name of a checkpoint."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def obsolete(settings: CheckpointSettings, names: Sequence[str]) -> list[str]:
    """Which of the whole checkpoints with these names are no longer kept."""
    matches = sorted((int(match[1]), int(match[2]), name) for name in names if (match := NAME.fullmatch(name)))
    every = settings.keep_every_rounds
    return [
        name for _, rounds, name in matches[: -settings.keep_last] if every is None or rounds == 0 or rounds % every
    ]


def prune(checkpoints: Path, settings: CheckpointSettings) -> None:
    """Remove the checkpoints in a folder that are no longer kept, and what is left of older, unfinished ones."""
    numbers = {path.name: number for path in checkpoints.iterdir() if (number := number_in(path.name)) is not None}
    whole = [name for name in numbers if (checkpoints / name / MANIFEST_FILE).exists()]
    newest = max((numbers[name] for name in whole), default=0)
    unfinished = [name for name, number in numbers.items() if name not in whole and number < newest]
    for name in [*obsolete(settings, whole), *unfinished]:
        (checkpoints / name / MANIFEST_FILE).unlink(missing_ok=True)  # first: half a checkpoint must look like none
        shutil.rmtree(checkpoints / name, ignore_errors=True)
