"""Files of a run that are compared with a manifest: every file's size and digest, written last.

A directory with a manifest that fits its files is whole; anything else is not.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from adloco_dist.messages import decode, encode

MANIFEST_FILE = "manifest.json"
PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


class DamagedError(Exception):
    """A file of a checkpoint is not what was written: which, and why."""


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint, as its manifest knows it."""

    num_bytes: int
    xxh3: str
    """xxh3_128, which finds damage at the speed of memory; it is no protection against forgery."""

    def check(self, name: str, read: "Part") -> None:
        """Raise a DamagedError unless the file that was read is this one."""
        if read.num_bytes != self.num_bytes:
            raise DamagedError(f"{name}: has {read.num_bytes} bytes instead of {self.num_bytes}")
        if read != self:
            raise DamagedError(f"{name}: does not fit its digest")


Manifest = Mapping[str, Part]
"""Parts by file name."""


def write_whole(path: Path, fill: Callable[[Path], Any]) -> None:
    """Fill a file beside `path`, see it safe on the disk, and rename it into place. If it cannot be written, an OSError
    is raised, and there is no file."""
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
    """Write a file that is not tensors, whole or not at all, which raises an OSError."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))
    return Part(len(content), xxh3_128(content).hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a whole checkpoint of the parts in `folder`; raises an OSError if that cannot be written."""
    write_content(folder / MANIFEST_FILE, encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as it is written, with a digest of its own."""
    content = {"parts": encode(dict(sorted(manifest.items())))}
    digest = xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`; raises a DamagedError if there is none, or not a byte of it may be believed."""
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"has no {MANIFEST_FILE}: was not completed") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST_FILE}: {error.strerror}") from error
    try:
        manifest = decode(dict[str, Part], json.loads(raw)["parts"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST_FILE}: cannot be read") from error
    if odd := [name for name in manifest if not PLAIN_NAME.fullmatch(name)]:
        raise DamagedError(f"{MANIFEST_FILE}: names {odd[0]!a}, which no file of a run is called")
    if encode_manifest(manifest) != raw:
        raise DamagedError(f"{MANIFEST_FILE}: does not fit its own digest")
    return manifest


def check_part(folder: Path, name: str, part: Part) -> None:
    """Raise a DamagedError unless the file can be read and is what the manifest says."""
    try:
        part.check(name, digest_of(folder / name))
    except OSError as error:
        raise DamagedError(f"{name}: {error.strerror}") from error


def digest_of(path: Path) -> Part:
    """The size and digest of a file as it can be read again."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxh3_128)
        return Part(file.tell(), digest.hexdigest())
