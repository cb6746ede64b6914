"""Where the text comes from: the standard library's sources, text files, or token files.

A corpus is the same on every rank or the run does not start: its digest is compared.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adloco_dist.config import Corpus, DataSettings, SettingsError
from adloco_dist.data.tokens import BYTE_VOCAB_SIZE, Tokens, TokenStore, encode_bytes

NOT_LIBRARY = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
DIGEST_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Splits:
    """Training and validation tokens of a corpus."""

    train: TokenStore
    validation: TokenStore
    vocab_size: int
    is_bytes: bool
    """Whether the tokens are bytes, so that the byte tokenizer belongs to the model."""
    source: str
    """What it was made of, for people."""
    digest: str
    """sha256 over both splits' ids; equal digests mean the same training data."""


def load_corpus(data: DataSettings) -> Splits:
    """Read and split the corpus that `data` names.

    Raises:
        SettingsError: no such file, unreadable, empty, or too short for one sequence of each split.
    """
    if data.corpus is Corpus.tokens:
        train, validation = _token_files(data)
        largest_id = max(_largest_id(train), _largest_id(validation))
        vocab_size = data.vocab_size or largest_id + 1
        source = f"{len(data.train)} token file(s)"
        if largest_id >= vocab_size:
            raise SettingsError(
                f"data.vocab_size={vocab_size}: {data.train[0]} holds id {largest_id}; set at least {largest_id + 1}"
            )
    else:
        train, validation, source = _byte_documents(data)
        vocab_size = BYTE_VOCAB_SIZE
    splits = {"train": train, "validation": validation}
    for name, tokens in splits.items():
        if len(tokens) <= data.sequence_length:
            raise SettingsError(
                f"data.sequence_length={data.sequence_length}: the {name} split ({source}) has {len(tokens)} tokens, "
                f"less than one sequence of {data.sequence_length} + 1; use more text or shorter sequences"
            )
    return Splits(
        train=TokenStore(train, data.sequence_length),
        validation=TokenStore(validation, data.sequence_length),
        vocab_size=vocab_size,
        is_bytes=data.corpus is not Corpus.tokens,
        source=source,
        digest=_digest(splits.values()),
    )


def _byte_documents(data: DataSettings) -> tuple[Tokens, Tokens, str]:
    if data.corpus is Corpus.python_stdlib:
        library = Path(sysconfig.get_path("stdlib"))
        paths = sorted(p for p in library.rglob("*.py") if not NOT_LIBRARY & {*p.relative_to(library).parts[:-1]})
        documents = _read("data.corpus", paths)
        source = f"{len(documents)} modules of Python {sysconfig.get_python_version()}'s standard library"
    else:
        documents = _read("data.train", _expand("data.train", data.train))
        source = f"{len(documents)} text file(s)"
    if data.validation:
        held_out = _read("data.validation", _expand("data.validation", data.validation))
    elif len(documents) > 1:
        # By content, so that the split does not depend on where a node keeps its files.
        by_content = sorted(documents, key=lambda document: hashlib.sha256(document).digest())
        num_held_out = min(max(1, round(data.validation_fraction * len(documents))), len(documents) - 1)
        held_out, chosen = by_content[:num_held_out], set(by_content[:num_held_out])
        documents = [document for document in documents if document not in chosen]
    else:
        tokens = encode_bytes(documents[0])
        return (*_split_tail(tokens, data.validation_fraction), source)
    return _join(documents), _join(held_out), source


def _token_files(data: DataSettings) -> tuple[Tokens, Tokens]:
    train = _open_tokens("data.train", data.train)
    if data.validation:
        return train, _open_tokens("data.validation", data.validation)
    return _split_tail(train, data.validation_fraction)


def _split_tail(tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens]:
    cut = len(tokens) - round(len(tokens) * fraction)
    return tokens[:cut], tokens[cut:]


def _expand(setting: str, patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, each once, sorted."""
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match) for match in glob.glob(pattern, recursive=True)]  # noqa: PTH207 (Path.glob refuses absolute patterns)
        files = [match for match in matches if match.is_file()]
        if not files:
            reason = "is not a file; name files or a glob" if matches else "no such file"
            raise SettingsError(f"{setting}={pattern}: {reason} (relative to {Path.cwd()})")
        found.update(files)
    return sorted(found)


def _read(setting: str, paths: Sequence[Path]) -> list[bytes]:
    """The contents of all files that are not empty."""
    documents: list[bytes] = []
    for path in paths:
        try:
            documents.append(path.read_bytes())
        except OSError as error:
            raise SettingsError(f"{setting}={path}: cannot be read ({error.strerror})") from error
    documents = [document for document in documents if document]
    if not documents:
        raise SettingsError(f"{setting}={paths[0] if paths else ''}: holds no text; name files that are not empty")
    return documents


def _join(documents: Sequence[bytes]) -> Tokens:
    return np.concatenate([encode_bytes(document) for document in documents])


def _open_tokens(setting: str, names: Sequence[str]) -> Tokens:
    """Memory-map .npy files of token ids; several are joined in memory."""
    stores: list[Tokens] = []
    for path in _expand(setting, names):
        try:
            store = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SettingsError(f"{setting}={path}: is no .npy file of token ids; write it with numpy.save") from error
        if not isinstance(store, np.ndarray) or store.ndim != 1 or store.dtype.kind != "u":
            shape = f"{store.dtype}{list(store.shape)}" if isinstance(store, np.ndarray) else "an archive"
            raise SettingsError(f"{setting}={path}: holds {shape}; must be one dimension of unsigned integers")
        if not len(store):
            raise SettingsError(f"{setting}={path}: holds no tokens; name a file that is not empty")
        stores.append(store)
    return stores[0] if len(stores) == 1 else np.concatenate(stores)


def _chunks(tokens: Tokens) -> Iterable[Tokens]:
    return (tokens[start : start + DIGEST_CHUNK_TOKENS] for start in range(0, len(tokens), DIGEST_CHUNK_TOKENS))


def _largest_id(tokens: Tokens) -> int:
    return max((int(chunk.max()) for chunk in _chunks(tokens)), default=0)


def _digest(splits: Iterable[Tokens]) -> str:
    digest = hashlib.sha256()
    for tokens in splits:
        digest.update(f"{tokens.dtype.str}{len(tokens)}".encode())
        for chunk in _chunks(tokens):
            digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest()
