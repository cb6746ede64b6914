"""A part of a checkpoint in memory, as the bytes of its file: filled while training waits, then written beside it."""

import errno
import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from xxhash import xxh3_128

from adloco_dist.run.manifest import Part, write_whole
from adloco_dist.run.tensor_file import header

BLOCK_BYTES = 4096
"""Memory and lengths that go to a disk past the page cache are multiples of it."""
NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT)
"""What a disk answers that wants other blocks, after a block that was cut off, and for memory that a GPU's driver has
pinned in a way of its own: then the file is written through the page cache."""


class StagingBuffer:
    """Room for one safetensors file, kept from one checkpoint to the next: fresh memory costs more than the copy.

    The format is written here, and read by its library: the library would write through the page cache, where the
    pages of a checkpoint, which nobody reads, cost ten times the transfer and push the corpus out.
    """

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
        """Write the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
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
