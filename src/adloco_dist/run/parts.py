"""The files of a checkpoint: parts, each with a digest in one manifest that is written last.

A directory with a manifest that fits its parts is a whole checkpoint; anything else is none. Nothing here is ever
unpickled: tensors are safetensors, the rest is JSON.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load
from xxhash import xxh3_128

from adloco_dist.config import CheckpointSettings
from adloco_dist.decisions.checkpointing import number_in, obsolete
from adloco_dist.decisions.typed import NOT_UNDERSTOOD, check

CHECKPOINTS_DIRECTORY = "checkpoints"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
RECORDS_FILE = "metrics.jsonl"
PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
READ_BYTES = 1 << 22


class DamagedError(Exception):
    """A file of a checkpoint is not what was written: which, and why."""


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint, as its manifest knows it."""

    num_bytes: int
    xxh3: str
    """xxh3_128, which finds damage at the speed of memory; it is no protection against forgery."""

    def check(self, name: str, content: bytes) -> None:
        """
        Raises:
            DamagedError: `content` is another.
        """
        _compare(name, self, Part(len(content), xxh3_128(content).hexdigest()))


@dataclass(frozen=True)
class TensorKind:
    """Of a tensor in a file: its type, as safetensors calls it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


Manifest = Mapping[str, Part]
"""By file name."""


def trainer_file(trainer: int) -> str:
    """What holds a trainer's outer state."""
    return f"trainer-{trainer}.safetensors"


def worker_file(trainer: int, worker: int) -> str:
    """What holds one worker's inner state."""
    return f"trainer-{trainer}-worker-{worker}.safetensors"


def write_whole(path: Path, fill: Callable[[Path], Any]) -> None:
    """Fill a file beside `path`, see it safe on the disk, and rename it into place.

    Raises:
        OSError: it cannot be written; there is no file then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fill(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        parent = os.open(path.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_content(path: Path, content: bytes) -> Part:
    """Write a part that is not tensors, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, lambda temporary: temporary.write_bytes(content))
    return Part(len(content), xxh3_128(content).hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a whole checkpoint of the parts in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    write_content(folder / MANIFEST_FILE, encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """As it is written: with a digest of its own."""
    content = {"parts": {name: asdict(part) for name, part in sorted(manifest.items())}}
    return json.dumps({**content, "digest": _digest(content)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        DamagedError: there is none, or not a byte of it may be believed.
    """
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"has no {MANIFEST_FILE}: was not completed") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST_FILE}: {error.strerror}") from error
    try:
        parts = json.loads(raw)["parts"]
        manifest = {name: Part(**part) for name, part in parts.items()}
        check(manifest, Mapping[str, Part])
    except NOT_UNDERSTOOD as error:
        raise DamagedError(f"{MANIFEST_FILE}: cannot be read") from error
    if odd := [name for name in manifest if not PLAIN_NAME.fullmatch(name)]:
        raise DamagedError(f"{MANIFEST_FILE}: names {odd[0]!a}, which no file of a run is called")
    if encode_manifest(manifest) != raw:
        raise DamagedError(f"{MANIFEST_FILE}: does not fit its own digest")
    return manifest


def check_part(folder: Path, name: str, part: Part) -> None:
    """
    Raises:
        DamagedError: the file is not what the manifest says, or cannot be read.
    """
    try:
        _compare(name, part, digest_of(folder / name))
    except OSError as error:
        raise DamagedError(f"{name}: {error.strerror}") from error


def decode_tensors(name: str, content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a part, on the CPU.

    Raises:
        DamagedError: it holds none, whatever its digest says.
    """
    try:
        return load(content)
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


def digest_of(path: Path) -> Part:
    """Of a file as it can be read again."""
    digest, num_bytes = xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(READ_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            num_bytes += count
    return Part(num_bytes, digest.hexdigest())


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


def _compare(name: str, wanted: Part, found: Part) -> None:
    if found.num_bytes != wanted.num_bytes:
        raise DamagedError(f"{name}: has {found.num_bytes} bytes instead of {wanted.num_bytes}")
    if found != wanted:
        raise DamagedError(f"{name}: does not fit its digest")


def _digest(content: Any) -> str:
    return xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
