"""A run directory as whoever looks at it finds it: trained, going on, killed, or half written."""

import fcntl
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose, flatten, to_plain
from adloco_dist.report.history import History, joined, read_history
from adloco_dist.run.directory import LOCK_FILE, METRICS_FILE
from adloco_dist.run.reading import RUN_FILE, read_run
from adloco_dist.run.rows import Record
from adloco_dist.text import one_line

LONGEST_NAME = 80


@dataclass(frozen=True)
class Source:
    """What a run has left so far."""

    directory: Path
    facts: Record
    """run.json; empty where it cannot be read."""
    history: History
    problems: tuple[str, ...]
    """What could not be read, a line each."""
    read_bytes: int
    """Bytes of metrics.jsonl that `history` holds."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return one_line(self.directory.resolve().name, LONGEST_NAME)

    @property
    def result(self) -> Record | None:
        """What the run came to; None: it has not ended."""
        return self.facts.get("result")

    @property
    def nodes(self) -> list[int]:
        """The node of every rank."""
        return self.facts.get("cluster", {}).get("nodes", [])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, by name."""
        return flatten(self.facts.get("settings", {}))

    @cached_property
    def changed(self) -> dict[str, Any]:
        """Settings that are not what they are by default."""
        default = _default_settings()
        return {name: value for name, value in self.settings.items() if name not in default or default[name] != value}

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine writes the run, as its lock says."""
        try:
            with (self.directory / LOCK_FILE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        if self.result:
            return f"ended: {self.result['stop']}"
        return "training" if self.is_running else "no end was recorded: killed, failed, or written by another machine"

    def read_on(self) -> "Source":
        """The same with what was written since; as new where the run has begun again."""
        path = self.directory / METRICS_FILE
        if not path.exists() or path.stat().st_size < self.read_bytes:
            return read_source(self.directory)
        more, end = read_history(path, self.read_bytes)
        facts, problems = _facts(self.directory)
        history = joined(self.history, more) if more.table.num_rows or more.problems else self.history
        return replace(self, facts=facts, history=history, problems=_problems(problems, history), read_bytes=end)


def read_source(directory: Path) -> Source:
    """Read what there is of a run.

    Raises:
        SettingsError: there is none in the directory.
    """
    path = directory / METRICS_FILE
    if not (directory / RUN_FILE).is_file() and not path.is_file():
        detail = f"has neither {RUN_FILE} nor {METRICS_FILE}; name a run directory"
        raise SettingsError(
            f"RUN={directory}: {detail if directory.is_dir() else 'is no directory; name a run directory'}"
        )
    facts, problems = _facts(directory)
    try:
        history, end = read_history(path)
    except OSError as error:
        raise SettingsError(f"RUN={directory}: {METRICS_FILE} cannot be read ({error.strerror})") from error
    if not history.table.num_rows and not facts:
        raise SettingsError(f"RUN={directory}: {(*problems, *history.problems)[0]}")
    return Source(directory, facts, history, _problems(problems, history), end)


@cache
def _default_settings() -> dict[str, Any]:
    """All settings as nobody has changed them, by name; composed once, for it takes as long as a page's figures."""
    return flatten(to_plain(compose([])))


def _facts(directory: Path) -> tuple[Record, list[str]]:
    try:
        return dict(read_run(directory)), []
    except SettingsError as error:
        return {}, [str(error).removeprefix(f"RUN={directory}: ")]


def _problems(problems: list[str], history: History) -> tuple[str, ...]:
    if not history.problems:
        return tuple(problems)
    count = len(history.problems)
    detail = f"{METRICS_FILE}: {count} line{'s are' if count > 1 else ' is'} left out, the first: {history.problems[0]}"
    return (*problems, one_line(detail))
