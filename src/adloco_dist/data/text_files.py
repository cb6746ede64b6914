"""Text files, each of which is a document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adloco_dist.config import Damaged, DataSettings, SettingsError
from adloco_dist.data.documents import Document
from adloco_dist.text import reason

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
"""How files begin that hold no text, what they are, and what to do."""


@dataclass(frozen=True)
class TextFiles:
    """Files that hold a document each."""

    setting: str
    """The setting that names them, for reports."""
    files: tuple[str, ...]
    data: DataSettings
    maximum: None = None
    """As of `RowFiles`, whose files hold several documents."""
    _not_utf8: dict[str, str] = field(default_factory=dict)
    """Files that are no UTF-8, and why, which are to be reported."""

    @classmethod
    def of(cls, setting: str, paths: Sequence[Path], data: DataSettings) -> "TextFiles":
        return cls(setting, tuple(map(str, paths)), data)

    def documents(self) -> Iterator[Document]:
        """The documents of all files that are not empty, in order.

        Raises:
            SettingsError: a file cannot be read, or holds no text, or no UTF-8 (data.damaged=skip leaves it out;
                without a tokenizer its bytes are read as they are).
        """
        for file in self.files:
            yield from self.of_file(file)

    def of_file(self, file: str) -> Iterator[Document]:
        """The document of one file; none if it is empty or left out."""
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            rule = f"cannot be read ({reason(error)}); name files that can"
            raise SettingsError(f"{self.setting}={file}: {rule}") from error
        for start, (kind, rule) in NOT_TEXT.items():
            if text.startswith(start):
                raise SettingsError(f"{self.setting}={file}: is {kind}, not text; {rule}")
        try:
            text.decode()
        except UnicodeDecodeError as error:
            detail = f"byte 0x{text[error.start]:02x} at {error.start:,}"
            if self.data.damaged is Damaged.skip or self.data.tokenizer is None:
                self._not_utf8[file] = detail
            else:
                rule = "convert it (iconv -f ITS_ENCODING -t UTF-8), or leave such files out with data.damaged=skip"
                raise SettingsError(f"{self.setting}={file}: is no UTF-8 ({detail}); {rule}") from error
            if self.data.damaged is Damaged.skip:
                return
        if text:
            yield Document(text)

    def take_notes(self) -> list[str]:
        """What was left out or is odd since the last call, in one line."""
        if not self._not_utf8:
            return []
        file, detail = next(iter(self._not_utf8.items()))
        count = f"{len(self._not_utf8):,} of {len(self.files):,} file(s)"
        self._not_utf8.clear()
        which = f"that are no UTF-8; the first is {file} ({detail})"
        if self.data.damaged is Damaged.skip:
            return [f"{self.setting}: left out {count} {which}"]
        return [f"{self.setting}: reads the bytes of {count} {which}; generated text will hold such bytes, too"]
