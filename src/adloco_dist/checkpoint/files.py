"""The files of a checkpoint. Nothing in them is ever unpickled: tensors are safetensors, the rest is JSON.

Safetensors files are written here and read by their library, which would write through the page cache, where the pages
of a checkpoint, which nobody reads, cost ten times the transfer and push the corpus out.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import load_file
from xxhash import xxh3_128

from adloco_dist.config import CheckpointSettings
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError, Part, write_whole

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


def can_be_done_without(file: str) -> bool:
    """Whether ranks that go on may do so without a file of a checkpoint: workers begin again at their anchors."""
    return "-worker-" in file or file == RECORDS_FILE


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


BLOCK_BYTES = 4096
"""Memory and lengths that go to a disk past the page cache are multiples of it."""
NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT)
"""What a disk answers that wants other blocks, after a block that was cut off, and for memory that a GPU's driver has
pinned in a way of its own: then the file is written through the page cache."""

DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Types of elements, as safetensors calls them."""


def header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file of these tensors, which may be on the meta device; where each starts behind them."""
    # Wide elements first: each tensor starts at a multiple of its elements' size, as a view of it must.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    ends = accumulate(tensors[name].nbytes for name in names)
    spans = {name: [end - tensors[name].nbytes, end] for name, end in zip(names, ends, strict=True)}
    entries: dict[str, object] = {
        name: {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": spans[name]}
        for name in names
    }
    content = json.dumps({"__metadata__": metadata, **entries} if metadata else entries).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content, {name: start for name, (start, _) in spans.items()}


class StagingBuffer:
    """Room for one safetensors file, kept from one checkpoint to the next: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors` by name; those on a GPU are there once it is synchronised."""
        start_of_file, offsets = header(tensors)
        self._num_bytes = len(start_of_file) + sum(tensor.nbytes for tensor in tensors.values())
        self._make_room(on_gpu=any(tensor.is_cuda for tensor in tensors.values()))
        self._room[: len(start_of_file)] = torch.frombuffer(bytearray(start_of_file), dtype=torch.uint8)
        for name, tensor in tensors.items():
            start = len(start_of_file) + offsets[name]
            place = self._room[start : start + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def write(self, path: Path) -> Part:
        """Write the file, whole or not at all; OSError where it cannot be written."""
        write_whole(path, self._write_past_cache)
        return Part(self._num_bytes, xxh3_128(self._room.numpy().data[: self._num_bytes]).hexdigest())

    def _make_room(self, on_gpu: bool) -> None:
        if len(self._room) < self._num_bytes + BLOCK_BYTES:
            memory = torch.empty(self._num_bytes + 2 * BLOCK_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
            self._room = memory[-memory.data_ptr() % BLOCK_BYTES :]

    def _write_past_cache(self, path: Path) -> None:
        num_blocks = -(-self._num_bytes // BLOCK_BYTES)
        blocks = self._room.numpy().data[: num_blocks * BLOCK_BYTES]
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            through_cache = fcntl.fcntl(file, fcntl.F_GETFL)
            with suppress(OSError):  # not every file system can
                fcntl.fcntl(file, fcntl.F_SETFL, through_cache | os.O_DIRECT)
            while blocks:
                try:
                    blocks = blocks[os.write(file, blocks) :]
                except OSError as error:
                    is_direct = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
                    if error.errno not in NOT_DIRECTLY or not is_direct:
                        raise
                    fcntl.fcntl(file, fcntl.F_SETFL, through_cache)
            os.ftruncate(file, self._num_bytes)
        finally:
            os.close(file)
