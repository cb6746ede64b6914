"""Files that settings name, and their rows: on this machine or elsewhere, plain or compressed."""

import glob
import io
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, cast

from adloco_dist.config.errors import SettingsError, refused
from adloco_dist.data.formats import Damage, Row, csv_rows, json_rows, parquet_rows
from adloco_dist.text import reason

OF_ARROW = {".zst": "zstd", ".lz4": "lz4"}
"""Compressions that pyarrow reads; all others are fsspec's."""
REMOTE_BYTES = 1 << 20
"""Bytes of a file elsewhere that are read at one time."""


def expand(setting: str, names: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, each once, sorted. A name that exists is a path, whatever it holds. Raises a
    SettingsError where one of them names no file, or something that is neither a file nor a folder."""
    named: set[Path] = set()
    for name in names:
        exists = _mode(Path(name)) is not None
        matches = [name] if exists else glob.glob(name, recursive=True)  # noqa: PTH207 (Path.glob refuses absolute patterns)
        files = []
        for path in map(Path, matches):
            mode = _mode(path)
            if mode is None:
                raise SettingsError(f"{setting}={name}: {path} is a link to what is not there; mend or remove it")
            if stat.S_ISREG(mode):
                files.append(path)
            elif not stat.S_ISDIR(mode):
                raise SettingsError(f"{setting}={name}: {path} is not a file but a pipe or device; name files")
        if not files:
            reason = "is not a file; name files or a glob" if matches else "no such file"
            raise SettingsError(f"{setting}={name}: {reason} (relative to {Path.cwd()})")
        named.update(files)
    return sorted(named)


def _mode(path: Path) -> int | None:
    """The mode of a file, links followed; None: it is not there, or may not be looked at."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None


def read_rows(
    setting: str, file: str, file_format: str, columns: Sequence[str], first_row: int = 0
) -> Generator[Row | Damage]:
    """The rows of a file (a path, or a URL of fsspec's such as hf://...), in order, from a row on; raises a
    SettingsError where the file cannot be opened.

    Args:
        setting: the one that names the file, for reports.
        file_format: json, csv or parquet.
        columns: those that are wanted; a row may hold more, or lack them.
    """
    raw = _opened(setting, file)
    number = first_row
    with closing(raw):
        try:
            for row in _rows(raw, file, file_format, columns, first_row):
                lost = (row.count or 1) if isinstance(row, Damage) else 1
                if row.number + lost > first_row:
                    yield row
                number = max(number, row.number + lost)
        except Exception as error:  # every reader has exceptions of its own
            is_packed = _codec(file) is not None and Path(file).is_file()
            where = f", at byte {raw.tell()} of {Path(file).stat().st_size}" if is_packed else ""
            yield Damage(number, f"{reason(error)}{where}", count=None)


def _opened(setting: str, file: str) -> BinaryIO:
    """Raises a SettingsError where there is no such file, it is not a file, or it may not be read."""
    path = Path(file)
    with refused(f"{setting}: {file} cannot be opened", "name files that can be read"):
        if "://" in file and not path.exists():
            from datasets.utils.file_utils import xopen  # fsspec's, with the hub's token and tries

            return io.BufferedReader(cast(io.RawIOBase, xopen(file, "rb")), REMOTE_BYTES)
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise SettingsError(f"{setting}: {file} is not a file; name files that can be read")
        return path.open("rb")


def _rows(raw: BinaryIO, file: str, file_format: str, columns: Sequence[str], first_row: int) -> Iterator[Row | Damage]:
    from fsspec.compression import compr

    codec = _codec(file)
    if codec in OF_ARROW.values():
        import pyarrow

        content = io.BufferedReader(cast(io.RawIOBase, pyarrow.CompressedInputStream(raw, codec)))
    else:
        content = cast(dict[str | None, Callable[..., BinaryIO]], compr)[codec](raw, mode="rb")
    if file_format == "parquet":
        return parquet_rows(raw if content is raw else io.BytesIO(content.read()), columns, first_row)
    return csv_rows(content) if file_format == "csv" else json_rows(content, first_row)


def _codec(file: str) -> str | None:
    """How a file is compressed, by its name; None: it is not."""
    from fsspec.utils import infer_compression

    return OF_ARROW.get(Path(file).suffix.lower()) or infer_compression(file)


def class_names(file: str, column: str) -> list[str] | None:
    """What a parquet file of a data set calls the classes of a column; None: it does not say."""
    from datasets import Features
    from pyarrow.parquet import read_schema

    try:
        with _opened("", file) as raw:
            feature = Features.from_arrow_schema(read_schema(raw)).get(column)
    except Exception:  # damage is reported when the rows are read
        return None
    return getattr(feature, "names", None)
