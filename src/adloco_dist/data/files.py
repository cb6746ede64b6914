"""The files that a setting names."""

import glob
import stat
from collections.abc import Sequence
from pathlib import Path

from adloco_dist.config import SettingsError


def expand(setting: str, names: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, each once, sorted. A name that exists is a path, whatever it holds.

    Raises:
        SettingsError: one of them names no file, or something that is neither a file nor a folder.
    """
    found: set[Path] = set()
    for name in names:
        exists = _mode(Path(name)) is not None
        matches = [name] if exists else glob.glob(name, recursive=True)  # noqa: PTH207 (Path.glob refuses absolute patterns)
        modes = {Path(match): _mode(Path(match)) for match in matches}
        files = [path for path, mode in modes.items() if mode is not None and stat.S_ISREG(mode)]
        for path, mode in modes.items():
            if mode is None:
                raise SettingsError(f"{setting}={name}: {path} is a link to what is not there; mend or remove it")
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise SettingsError(f"{setting}={name}: {path} is not a file but a pipe or device; name files")
        if not files:
            reason = "is not a file; name files or a glob" if matches else "no such file"
            raise SettingsError(f"{setting}={name}: {reason} (relative to {Path.cwd()})")
        found.update(files)
    return sorted(found)


def _mode(path: Path) -> int | None:
    """What it is, links followed; None: it is not there, or may not be looked at."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return None
