"""Text files, each of which is a document; those of Python's standard library are on every machine."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from adloco_dist.config import Damaged, DataSettings, SettingsError, refused
from adloco_dist.data.documents import Document, hold_out
from adloco_dist.data.encoding import Text, as_bytes

NOT_TEXT = {
    b"PAR1": ("parquet", "set data=parquet"),
    b"\x1f\x8b": ("compressed with gzip", "decompress it with gunzip, or set data=json if it holds JSON lines"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "decompress it with unzstd, or set data=json if it holds JSON lines"),
    b"\xfd7zXZ\0": ("compressed with xz", "decompress it with unxz, or set data=json if it holds JSON lines"),
    b"BZh": ("compressed with bzip2", "decompress it with bunzip2, or set data=json if it holds JSON lines"),
    b"PK\3\4": ("a zip archive", "unpack it"),
    b"\x93NUMPY": ("an array of numpy", "set data=tokens if it holds token ids"),
    b"MMIDIDX": ("an index of Megatron's", "set data=tokens and name the .bin file beside it"),
    b"ARROW1": ("an Arrow file", "write it as parquet, and set data=parquet"),
    b"%PDF-": ("PDF", "extract its text, for example with pdftotext"),
    b"SQLite format 3": ("a database", "write its texts as JSON lines, and set data=json"),
}
"""The first bytes of files that hold no text, what these files are, and what to do."""
NOT_LIBRARY = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
NUM_PACKAGES, MIN_FILES = 6, 10
"""Classes of the labelled corpus, the packages with the most text, and the least number of files that each has."""
SNIPPET_BYTES = 256
"""Minimum size of a piece of text, except a file's last."""


@dataclass(frozen=True)
class TextFiles:
    """Files that hold a document each."""

    setting: str
    """The setting that names them, for reports."""
    files: tuple[str, ...]
    data: DataSettings
    _not_utf8: dict[str, str] = field(default_factory=dict)
    """Files that are not UTF-8, with the byte that is not, until they are reported."""

    def documents(self) -> Iterator[Document]:
        """The documents of all files that are not empty, in order."""
        return (document for file in self.files for document in self.of_file(file))

    def of_file(self, file: str) -> Iterator[Document]:
        """The document of one file; none if it is empty or left out; raises a SettingsError where it cannot be read, or
        is not text, or not UTF-8 (data.damaged=skip leaves it out; without a tokenizer its bytes are read as they are).
        """
        with refused(f"{self.setting}={file}: cannot be read", "name files that can"):
            text = Path(file).read_bytes()
        for start, (kind, rule) in NOT_TEXT.items():
            if text.startswith(start):
                raise SettingsError(f"{self.setting}={file}: is {kind}, not text; {rule}")
        try:
            text.decode()
        except UnicodeDecodeError as error:
            place = f"byte 0x{text[error.start]:02x} at {error.start:,}"
            if self.data.damaged is Damaged.refuse and self.data.tokenizer is not None:
                rule = "convert it (iconv -f ITS_ENCODING -t UTF-8), or leave such files out with data.damaged=skip"
                raise SettingsError(f"{self.setting}={file}: is no UTF-8 ({place}); {rule}") from error
            self._not_utf8[file] = place
            if self.data.damaged is Damaged.skip:
                return
        if text:
            yield Document(text)

    def take_notes(self) -> list[str]:
        """One line about the files since the last call that are not UTF-8."""
        if not self._not_utf8:
            return []
        file, place = next(iter(self._not_utf8.items()))
        count = f"{len(self._not_utf8):,} of {len(self.files):,} file(s)"
        self._not_utf8.clear()
        which = f"that are no UTF-8; the first is {file} ({place})"
        if self.data.damaged is Damaged.skip:
            return [f"{self.setting}: left out {count} {which}"]
        return [f"{self.setting}: reads the bytes of {count} {which}; generated text will hold such bytes, too"]


def library_sources() -> list[Path]:
    """The modules of the standard library, sorted."""
    library = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in library.rglob("*.py") if not NOT_LIBRARY & {*path.relative_to(library).parts[:-1]})


def package_snippets(validation_fraction: float) -> tuple[list[Document], list[Document], list[str]]:
    """Pieces of the largest packages' sources, each labelled with its package: (training, validation, names). No text
    is in both splits."""
    library = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, list[bytes]] = {}
    for path in library_sources():
        package, *inside = path.relative_to(library).parts
        if inside:
            modules.setdefault(package, []).append(path.read_bytes())
    large = [name for name in modules if len(modules[name]) >= MIN_FILES]
    names = sorted(sorted(large, key=lambda name: (-sum(map(len, modules[name])), name))[:NUM_PACKAGES])
    splits: tuple[list[Document], list[Document]] = [], []
    for number, name in enumerate(names):
        files = hold_out([Document(text, number) for text in modules[name]], validation_fraction)
        for split, documents in zip(splits, files, strict=True):
            split += [Document(piece, number) for document in documents for piece in _pieces(document.text)]
    return *splits, names


def _pieces(text: Text) -> Iterator[bytes]:
    """Whole lines, in pieces of SNIPPET_BYTES or a little more."""
    piece = b""
    for line in as_bytes(text).splitlines(keepends=True):
        piece += line
        if len(piece) >= SNIPPET_BYTES:
            yield piece
            piece = b""
    if piece.strip():
        yield piece
