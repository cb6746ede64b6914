"""Paths on the command line: what the shell gave whole is taken as it stands, whatever Hydra's grammar makes of it."""

import glob
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from adloco_dist.config.errors import require

LISTS = ("data.train", "data.validation")
WRITTEN = ("run.directory", "run.root", "hydra.sweep.dir")
"""Settings whose paths need not exist yet: some folder above them does."""
PATHS = (*LISTS, *WRITTEN, "data.hub", "data.tokenizer", "model.warm_start", "batching.replay", "run.replay")


def with_quoted_paths(override: str) -> str:
    """`override` with Hydra's quotes around the paths that it names and Hydra would not read as they stand.

    Values that Hydra reads as text keep their meaning: quotes, lists, interpolations, null, and values of a sweep,
    unless all of the value, commas included, is one path or glob that exists.
    """
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if name not in PATHS or not value or "${" in value:
        return override
    read = _read(override)
    shown = _list(value, read) if name in LISTS else _scalar(value, read, name in WRITTEN)
    return override if shown is None else f"{key}={shown}"


def to_type(override: str) -> str | None:
    """What a shell and Hydra take as the paths that a user meant; None: the setting holds none."""
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if name not in PATHS or not value:
        return None
    names = [value]
    if name in LISTS:
        names = [one.strip() for one in (value[1:-1] if _is_bracketed(value) else value).split(",")]
    shown = ",".join(quoted(_bare(one), Quote.double) for one in names)
    return shlex.quote(f"{key}=[{shown}]" if name in LISTS else f"{key}={shown}")


def exists_here(name: str) -> bool:
    """Whether a path or a glob names something on this machine."""
    try:
        return Path(name).is_symlink() or Path(name).exists() or bool(glob.glob(name, recursive=True))  # noqa: PTH207
    except (OSError, ValueError):
        return False


def check_lengths(flat: Mapping[str, object]) -> None:
    """Refuse paths, of settings by dotted key, that no file system of Linux takes, by a SettingsError."""
    for key in PATHS:
        value = flat.get(key)
        for path in value if isinstance(value, list) else [value]:
            encoded = os.fsencode(str(path))
            longest = max(map(len, encoded.split(b"/")))
            rule = f"has {len(encoded):,} bytes, {longest:,} of them in one name; a path has at most 4,095, a name 255"
            require(len(encoded) < 4096 and longest < 256, key, path, rule)


def _scalar(value: str, read: Override | None, is_written: bool) -> str | None:
    """Return the value of a path setting as Hydra has to be given it; None: it reads the value as it is meant."""
    names = _names(value.split(","))
    if read is None:
        names = names or (value.split(",") if is_written else None)
        return ",".join(map(_kept_or_quoted, names)) if names else None
    if read.is_sweep_override():  # unless the commas are in the names
        return quoted(value) if names == [value] else None
    meant = read.value()
    if meant in (None, value) or not (exists_here(value) or (is_written and not isinstance(meant, str))):
        return None
    return quoted(value)


def _list(value: str, read: Override | None) -> str | None:
    """Return the value of a list of paths, like `_scalar`; a name without brackets is a list of one."""
    if not _is_bracketed(value):
        lists = [[name] for name in _names(value.split(",")) or ()]
    else:
        if read is not None:
            meant = [] if read.is_sweep_override() else read.value()
            if isinstance(meant, list) and all(map(exists_here, map(str, meant))):
                return None
        whole = _names(value[1:-1].split(","))
        lists = [whole or [value]]  # a list, or a name in brackets
        if not (whole or exists_here(value)):  # a sweep
            lists = [_names(part.split(",")) or [] for part in value[1:-1].split("],[")]
    return ",".join(f"[{','.join(map(_kept_or_quoted, names))}]" for names in lists) if all(lists) and lists else None


def _names(pieces: Sequence[str]) -> list[str] | None:
    """The names that pieces between commas are, or are parts of, the shortest first; None: some do not exist."""
    for count in range(1, len(pieces) + 1):
        joined = ",".join(pieces[:count])
        name = joined if exists_here(joined) else joined.strip()
        if name and (_bare(name) != name or exists_here(name)):
            rest = _names(pieces[count:])
            if rest is not None:
                return [name, *rest]
    return None if pieces else []


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
