"""Token files: .npy arrays of ids, alone or in a folder with a manifest, memory-mapped.

A folder that launch/tokenize_corpus.py wrote says what its files hold: training from it begins without reading them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adloco_dist.config import SettingsError, require
from adloco_dist.data.encoding import Tokens
from adloco_dist.data.files import expand
from adloco_dist.data.foreign_tokens import conversion
from adloco_dist.data.items import joined_digest
from adloco_dist.messages import decode
from adloco_dist.text import reason

MANIFEST_FILE = "manifest.json"
CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """One file of a folder."""

    name: str
    num_tokens: int
    max_id: int
    sha256: str
    """Digest of the ids as stored."""


@dataclass(frozen=True)
class Manifest:
    """What a folder of token files holds."""

    files: list[TokenFile]
    tokenizer: str | None
    """Folder of the tokenizer, relative to this one."""
    vocab_size: int
    source: dict[str, Any] = field(default_factory=dict)
    """What it was made of."""

    @property
    def digest(self) -> str:
        """Digest of everything that training depends on."""
        return joined_digest(*(file.sha256 for file in self.files))


@dataclass(frozen=True)
class TokenFiles:
    """Token files that were opened."""

    parts: list[Tokens]
    max_id: int
    digest: str
    vocab_size: int | None = None
    """By the folder's manifest; None: there is no manifest."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; None: it is unknown."""


def open_tokens(setting: str, names: Sequence[str]) -> TokenFiles:
    """Memory-map the token files of a folder, or those that paths and globs name; raises a SettingsError where they
    are no token files."""
    if len(names) == 1 and Path(names[0]).is_dir():
        return _open_folder(setting, Path(names[0]))
    # Without a manifest, the files are read once for their digest.
    parts = [_open(setting, path) for path in expand(setting, names)]
    return TokenFiles(parts, max(map(max_id, parts)), digest_of(parts))


def _open_folder(setting: str, folder: Path) -> TokenFiles:
    """Memory-map the files of a folder with a manifest, of which only the sizes are checked."""
    try:
        manifest = decode(Manifest, json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        _refuse_foreign(setting, folder)
        rule = f"is a folder without {MANIFEST_FILE}; name files, or a folder that tokenize_corpus.py has finished"
        raise SettingsError.of(setting, folder, rule) from error
    except (OSError, ValueError) as error:
        rule = f"its {MANIFEST_FILE} cannot be read ({reason(error)}); make the folder again"
        raise SettingsError.of(setting, folder, rule) from error
    require(bool(manifest.files), setting, folder, "holds no tokens; name a folder that is not empty")
    parts = [_open(setting, folder / file.name) for file in manifest.files]
    for file, tokens in zip(manifest.files, parts, strict=True):
        has = f"{folder / file.name} holds {len(tokens)} tokens, {file.num_tokens} by the manifest"
        rule = f"{has}; make the folder again with launch/tokenize_corpus.py"
        require(len(tokens) == file.num_tokens, setting, folder, rule)
    largest, tokenizer = max(file.max_id for file in manifest.files), manifest.tokenizer
    return TokenFiles(parts, largest, manifest.digest, manifest.vocab_size, folder / tokenizer if tokenizer else None)


def _open(setting: str, path: Path) -> Tokens:
    try:
        store = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's, or of what the file looks like, such as an archive
        _refuse_foreign(setting, path)
        rule = f"is no .npy file of token ids ({reason(error)}); write it with numpy.save"
        raise SettingsError.of(setting, path, rule) from error
    if not isinstance(store, np.ndarray) or store.ndim != 1 or store.dtype.kind != "u":
        _refuse_foreign(setting, path)
        has = f"{store.dtype}{list(store.shape)}" if isinstance(store, np.ndarray) else "an archive"
        raise SettingsError.of(setting, path, f"holds {has}; must be one dimension of unsigned integers")
    require(len(store) > 0, setting, path, "holds no tokens; name a file that is not empty")
    return store


def _refuse_foreign(setting: str, path: Path) -> None:
    """Raises a SettingsError with the command that converts a file of another program, where it is one."""
    if foreign := conversion(path):
        kind, command = foreign
        where = "" if command.startswith("set ") else "convert it: "
        raise SettingsError(f"{setting}={path}: is {kind}, not token files of one dimension in .npy; {where}{command}")


def max_id(tokens: Tokens) -> int:
    """The largest token id, 0 where there is none."""
    return max((int(chunk.max()) for chunk in _chunks(tokens)), default=0)


def digest_of(parts: Iterable[Tokens]) -> str:
    """sha256 over the ids."""
    digest = hashlib.sha256()
    for tokens in parts:
        digest.update(f"{tokens.dtype.str}{len(tokens)}".encode())
        for chunk in _chunks(tokens):
            digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest()


def split_tail(parts: Sequence[Tokens], fraction: float) -> tuple[list[Tokens], list[Tokens]]:
    """The first tokens, and the last `fraction` of all; nothing is copied."""
    left = round(sum(map(len, parts)) * fraction)
    head, tail = list(parts), []
    while left > 0:
        last = head.pop()
        cut = max(0, len(last) - left)
        left -= len(last) - cut
        tail.insert(0, last[cut:])
        if cut:
            head.append(last[:cut])
    return head, tail


def _chunks(tokens: Tokens) -> Iterable[Tokens]:
    return (tokens[start : start + CHUNK_TOKENS] for start in range(0, len(tokens), CHUNK_TOKENS))
