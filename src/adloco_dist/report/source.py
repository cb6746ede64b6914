"""A run directory as whoever looks at it finds it: trained, going on, killed, or half written."""

import fcntl
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.messages import Json
from adloco_dist.report.history import History, read_history
from adloco_dist.run.directory import LOCK_FILE
from adloco_dist.run.reading import RUN_FILE, read_run
from adloco_dist.run.rows import METRICS_FILE
from adloco_dist.text import one_line

LONGEST_NAME = 80


@dataclass(frozen=True)
class Source:
    """What a run has left so far."""

    directory: Path
    facts: Json
    """run.json; empty where it cannot be read."""
    unreadable: str | None
    """Why it cannot be read."""
    history: History

    @property
    def problems(self) -> list[str]:
        """What could not be read, a line each."""
        problems = [self.unreadable] if self.unreadable else []
        if lines := self.history.columns.problems:
            count = f"{len(lines)} line{'s are' if len(lines) > 1 else ' is'}"
            problems.append(one_line(f"{METRICS_FILE}: {count} left out, the first: {lines[0]}"))
        return problems

    @property
    def name(self) -> str:
        return one_line(self.directory.resolve().name, LONGEST_NAME)

    @property
    def result(self) -> Json | None:
        """What the run came to; None: it has not ended."""
        return self.facts.get("result")

    @property
    def cluster(self) -> Json:
        """Its nodes, ranks and links, as far as they are known."""
        return {"nodes": [], "ranks": [], "links": [], **self.facts.get("cluster", {})}

    @property
    def is_simulated(self) -> bool:
        """Whether its seconds were counted instead of measured."""
        return self.settings.get("simulation.update_seconds") is not None

    @cached_property
    def settings(self) -> dict[str, Any]:
        return flatten(self.facts.get("settings", {}))

    @cached_property
    def changed(self) -> dict[str, Any]:
        """Settings that are not what they are by default."""
        default = flatten(to_plain(Settings()))
        return {name: value for name, value in self.settings.items() if name not in default or default[name] != value}

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        if self.result:
            return f"ended: {self.result['stop']}"
        try:
            with (self.directory / LOCK_FILE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # a process of this machine writes it
            return "training"
        except OSError:
            pass
        return "no end was recorded: killed, failed, or written by another machine"


def read_source(directory: Path, earlier: History | None = None, processes: Executor | None = None) -> Source:
    """What there is of a run, whose `earlier` rows are not read again; raises a SettingsError if there is no run."""
    path = directory / METRICS_FILE
    if not (directory / RUN_FILE).is_file() and not path.is_file():
        what = f"has neither {RUN_FILE} nor {METRICS_FILE}" if directory.is_dir() else "is no directory"
        raise SettingsError(f"RUN={directory}: {what}; name a run directory")
    try:
        history = read_history(path, earlier, processes)
    except OSError as error:
        raise SettingsError(f"RUN={directory}: {METRICS_FILE} cannot be read ({error.strerror})") from error
    try:
        return Source(directory, dict(read_run(directory)), None, history)
    except SettingsError as error:
        if not len(history.rounds):
            raise
        return Source(directory, {}, str(error).removeprefix(f"RUN={directory}: "), history)
