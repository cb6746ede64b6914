"""The files of a checkpoint. Nothing in them is ever unpickled: tensors are safetensors, the rest is JSON."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adloco_dist.checkpoint.retention import number_in, obsolete
from adloco_dist.config import CheckpointSettings
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError

CHECKPOINTS_DIRECTORY = "checkpoints"
STATE_FILE = "state.json"
RECORDS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TensorKind:
    """The type of a tensor in a file, as safetensors calls it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


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

    Args:
        name: what the part is called in its checkpoint.

    Raises:
        DamagedError: it holds none, whatever its digest says.
        OSError: it cannot be read.
    """
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # safetensors has errors of its own, torch of several kinds
        raise DamagedError(f"{name}: holds no tensors ({error})") from error


def tensor_kinds(folder: Path, name: str) -> dict[str, TensorKind]:
    """What tensors a part holds, from its header.

    Raises:
        DamagedError: none, whatever its digest says.
    """
    try:
        with safe_open(folder / name, framework="pt") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
            return {key: TensorKind(part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}
    except Exception as error:  # safetensors has errors of its own
        raise DamagedError(f"{name}: holds no tensors ({error})") from error


def prune(checkpoints: Path, settings: CheckpointSettings) -> None:
    """Remove the checkpoints in a folder that are kept no longer, and what is left of older, unfinished ones."""
    found = [path.name for path in checkpoints.iterdir() if number_in(path.name) is not None]
    whole = [name for name in found if (checkpoints / name / MANIFEST_FILE).exists()]
    newest = max(map(_number, whole), default=0)
    unfinished = [name for name in found if name not in whole and _number(name) < newest]
    for name in [*obsolete(settings, whole), *unfinished]:
        (checkpoints / name / MANIFEST_FILE).unlink(missing_ok=True)  # first: half a checkpoint must look like none
        shutil.rmtree(checkpoints / name, ignore_errors=True)


def _number(name: str) -> int:
    return number_in(name) or 0
