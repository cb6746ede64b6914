"""Corpora that every machine has: the sources of the running Python's standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from adloco_dist.data.documents import Document
from adloco_dist.data.order import by_content

NOT_LIBRARY = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
NUM_PACKAGES, MIN_FILES = 6, 10
"""Classes of the labelled corpus: so many packages, those with the most text, of so many files or more."""
SNIPPET_BYTES = 256
"""Minimum size of a piece of text, unless it is a file's last."""


def library_sources() -> list[Path]:
    """The modules of the standard library, sorted."""
    library = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in library.rglob("*.py") if not NOT_LIBRARY & {*path.relative_to(library).parts[:-1]})


def package_snippets(validation_fraction: float) -> tuple[list[Document], list[Document], list[str]]:
    """Pieces of the largest packages' sources, each labelled with its package: (training, validation, names).

    No file is in both splits.
    """
    library = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, list[bytes]] = {}
    for path in library_sources():
        package, *inside = path.relative_to(library).parts
        if inside:
            texts.setdefault(package, []).append(path.read_bytes())
    large = [name for name in texts if len(texts[name]) >= MIN_FILES]
    names = sorted(sorted(large, key=lambda name: (-sum(map(len, texts[name])), name))[:NUM_PACKAGES])
    train: list[Document] = []
    validation: list[Document] = []
    for number, name in enumerate(names):
        kept, held_out = by_content(texts[name], validation_fraction)
        train += [Document(piece, number) for text in kept for piece in _pieces(text)]
        validation += [Document(piece, number) for text in held_out for piece in _pieces(text)]
    return train, validation, names


def _pieces(text: bytes) -> Iterator[bytes]:
    """Whole lines, SNIPPET_BYTES or a little more of them at a time."""
    piece = b""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= SNIPPET_BYTES:
            yield piece
            piece = b""
    if piece.strip():
        yield piece
