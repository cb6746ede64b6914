"""Paths on the command line: what the shell gave whole is taken as it stands, whatever Hydra's grammar makes of it."""

import glob
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from adloco_dist.config.errors import SettingsError

LISTS = ("data.train", "data.validation")
READ = ("data.hub", "data.tokenizer", "model.warm_start", "batching.replay")
WRITTEN = ("run.directory", "run.root", "run.stop_file", "hydra.sweep.dir")
"""Settings whose paths need not exist yet: some folder above them does."""

Exists = Callable[[str], bool]


def with_quoted_paths(override: str, exists: Exists) -> str:
    """`override` with Hydra's quotes around the paths that it names and Hydra would not read as they stand.

    Values that Hydra reads as text keep their meaning: quotes, lists, interpolations, null, and values of a sweep,
    unless all of the value, commas included, is one path that exists.

    Args:
        exists: whether a path, or a glob, names something.
    """
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    if not equals or not value or "${" in value or name not in (*LISTS, *READ, *WRITTEN):
        return override
    read = _read(override)
    shown = _list(value, read, exists) if name in LISTS else _scalar(value, read, exists, name in WRITTEN)
    return override if shown is None else f"{key}={shown}"


def to_type(override: str) -> str | None:
    """What a shell and Hydra take as the paths that a user meant; None: the setting holds none."""
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if name not in (*LISTS, *READ, *WRITTEN) or not value:
        return None
    if name not in LISTS:
        return shlex.quote(f"{key}={quoted(_bare(value), Quote.double)}")
    inner = value[1:-1] if _is_bracketed(value) else value
    elements = ",".join(quoted(_bare(element.strip()), Quote.double) for element in inner.split(","))
    return shlex.quote(f"{key}=[{elements}]")


def exists_here(name: str) -> bool:
    """Whether a path or a glob names something on this machine."""
    try:
        return Path(name).is_symlink() or Path(name).exists() or bool(glob.glob(name, recursive=True))  # noqa: PTH207
    except (OSError, ValueError):
        return False


def check_lengths(flat: Mapping[str, object]) -> None:
    """Refuse paths that no file system of Linux takes; whoever looks for them would fail, each in its own way.

    Args:
        flat: settings by dotted key.

    Raises:
        SettingsError: a name in a path is too long, or all of it.
    """
    for key in (*LISTS, *READ, *WRITTEN):
        value = flat.get(key)
        for path in value if isinstance(value, list) else [value]:
            encoded = os.fsencode(str(path))
            longest = max(map(len, encoded.split(b"/")))
            rule = f"has {len(encoded):,} bytes, {longest:,} of them in one name; a path has at most 4,095, a name 255"
            if len(encoded) >= 4096 or longest >= 256:
                raise SettingsError.of(key, path, rule)


def _scalar(value: str, read: Override | None, exists: Exists, is_written: bool) -> str | None:
    """Return the value of a path setting as Hydra has to be given it; None: it reads the value as it is meant."""
    names = _names(value, exists) or (value.split(",") if is_written else None)
    if read is None:
        return ",".join(map(_kept_or_quoted, names)) if names else None
    if read.is_sweep_override():  # unless the commas are in the names
        return quoted(value) if names == [value] else None
    meant = read.value()
    is_no_text = meant is not None and not isinstance(meant, str)  # a number, a list
    is_other = meant is not None and meant != value
    return quoted(value) if (is_no_text and is_written) or (is_other and exists(value)) else None


def _list(value: str, read: Override | None, exists: Exists) -> str | None:
    """Return the value of a list of paths, like `_scalar`; a name without brackets is a list of one."""
    if not _is_bracketed(value):
        names = _names(value, exists)
        return ",".join(f"[{_kept_or_quoted(name)}]" for name in names) if names else None
    if read is not None and read.is_sweep_override():
        return None
    meant = read.value() if read is not None else None
    if isinstance(meant, list) and all(isinstance(name, str) and exists(name) for name in meant):
        return None
    lists = [_names(value[1:-1], exists)]
    if lists == [None]:  # a sweep over lists, or a name in brackets
        lists = [[value]] if exists(value) else [_names(part, exists) for part in value[1:-1].split("],[")]
    if not all(lists):
        return None
    return ",".join(f"[{','.join(map(_kept_or_quoted, names or []))}]" for names in lists)


def _names(value: str, exists: Exists) -> list[str] | None:
    """The names that commas part, or that have commas in them; None: some of them do not exist."""
    return _grouped(value.split(","), exists) or ([value] if exists(value) else None)


def _grouped(pieces: Sequence[str], exists: Exists) -> list[str] | None:
    """Neighbours joined by their commas so that every name exists, the shortest first; None: there is no such way."""
    if not pieces:
        return []
    for count in range(1, len(pieces) + 1):
        joined = ",".join(pieces[:count])
        name = joined if exists(joined) else joined.strip()
        if name and (_bare(name) != name or exists(name)):
            rest = _grouped(pieces[count:], exists)
            if rest is not None:
                return [name, *rest]
    return None


def _read(override: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def _is_bracketed(value: str) -> bool:
    return value.startswith("[") and value.endswith("]")


def _bare(value: str) -> str:
    """Return `value` without the quotes around it."""
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"" else value


def _kept_or_quoted(name: str) -> str:
    return name if _bare(name) != name else quoted(name)


def as_text(value: str) -> str:
    """A value of Hydra's grammar as people read it: paths and words without the quotes that the grammar needs."""
    read = _read(f"x={value}")
    meant = read.value() if read is not None else value
    if isinstance(meant, list) and all(isinstance(item, str) for item in meant):
        return f"[{','.join(map(str, meant))}]"
    return str(meant) if isinstance(meant, str) else value


def quoted(name: str, quote: Quote = Quote.single) -> str:
    """`name` as Hydra's grammar takes a string with any characters."""
    return QuotedString(name.replace("${", "\\${"), quote).with_quotes()  # else it were an interpolation
