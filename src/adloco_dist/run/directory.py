"""The run directory: opened once, by rank 0, and written by one run at a time."""

import fcntl
import os
import shutil
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from adloco_dist.config import RunSettings, SettingsError, Unfinished, require
from adloco_dist.messages import Json
from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.run.journal import Sink
from adloco_dist.run.reading import RUN_FILE, read_run
from adloco_dist.run.rows import METRICS_FILE, TrainerRow

MODEL_DIRECTORY = "model"
LOGS_DIRECTORY = "logs"
PROFILE_DIRECTORY = "profile"
STOP_FILE = "stop"
STOP_VARIABLE = "ADLOCO_STOP_FILE"
"""Environment variable that names another file, which may be there before the run directory is: batch jobs set it."""
LOCK_FILE = ".lock"
OF_EVERY_NODE = {"checkpoints", LOGS_DIRECTORY, PROFILE_DIRECTORY}
"""What a run leaves on nodes that do not keep its records."""


class DirectoryTakenError(RuntimeError):
    """Another process writes into this run's directory: this one must not continue."""


class RunDirectory(Sink):
    """A directory that this process alone writes; also a sink, which looks before every write whether that still holds.

    The kernel frees the lock when the process ends, however it ends. Where a file system does not share locks between
    hosts, whoever opens the directory later leaves another generation in the lock file, which stops the earlier one.
    """

    def __init__(self, setting: str, path: Path) -> None:
        """Take `path`, which exists; raises a SettingsError if another process has it."""
        self.path = path
        self._lock = (path / LOCK_FILE).open("a+", encoding="utf-8", errors="replace")
        self._lock.seek(0)
        holder = self._lock.read()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SettingsError(f"{setting}={path}: is being written by {holder}; end that, or name another") from None
        except OSError:  # a file system without locks: generations remain
            pass
        host, now = socket.gethostname(), datetime.now(UTC).isoformat(timespec="microseconds")
        self._generation = f"process {os.getpid()} on {host} since {now}"
        self._lock.truncate(0)
        self._lock.write(self._generation)
        self._lock.flush()

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Raise a DirectoryTakenError if another process has taken the directory, or it is gone; write nothing."""
        try:
            holder = (self.path / LOCK_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DirectoryTakenError(f"{self.path} is gone ({error.strerror})") from error
        if holder != self._generation:
            raise DirectoryTakenError(f"{self.path} is now written by {holder}")

    def close(self, result: Json | None = None) -> None:
        self._lock.close()


def open_directory(run: RunSettings, needed_bytes: int, is_resumed: bool = False) -> RunDirectory:
    """Make and take the directory that `run` names, or a new one under its root, named by date and time.

    Args:
        needed_bytes: what must be free there.
        is_resumed: a run that is there resumes from one of its checkpoints.

    Raises:
        SettingsError: it holds another run or other files, is in use, or cannot be made or written. Nothing was made
            or changed then.
    """
    setting, path = _asked(run)
    check_place(setting, path, needed_bytes)
    try:
        if run.directory is None:
            path = _make_new(path)
        elif is_resumed:
            path.mkdir(parents=True, exist_ok=True)  # the checkpoint may lie on other nodes
            _refuse_other_kinds(setting, path)
        else:
            if _holds_run(setting, path, run.unfinished):
                archive(setting, path)
            path.mkdir(parents=True, exist_ok=True)
        return RunDirectory(setting, path)
    except OSError as error:
        raise SettingsError(f"{setting}={path}: cannot be written ({error.strerror}); name another") from error


def check_directory(run: RunSettings) -> None:
    """Raise the SettingsError of `open_directory`, as far as it is known before anything starts; nothing is changed."""
    setting, path = _asked(run)
    check_place(setting, path)
    try:
        if run.directory is not None and run.unfinished is not Unfinished.resume:
            _holds_run(setting, path, run.unfinished)
    except OSError as error:
        raise SettingsError(f"{setting}={path}: cannot be read ({error.strerror}); name another") from error


def _asked(run: RunSettings) -> tuple[str, Path]:
    """The setting that says where the run directory is, and the path."""
    setting = "run.root" if run.directory is None else "run.directory"
    return setting, Path(run.directory or f"{run.root}/{datetime.now():%Y-%m-%d_%H-%M-%S}")


def _holds_run(setting: str, path: Path, unfinished: Unfinished) -> bool:
    """Whether there is a run that may be moved or resumed; raises a SettingsError for other runs and other files."""
    if not ((path / LOCK_FILE).exists() or (path / RUN_FILE).exists()):
        if path.is_dir() and {entry.name for entry in path.iterdir()} - OF_EVERY_NODE:
            raise SettingsError(f"{setting}={path}: holds other files; name a new or an empty directory")
        return False
    if is_finished(path):
        raise SettingsError(f"{setting}={path}: already holds a run; name a new directory, or leave it out")
    if unfinished is Unfinished.refuse:
        remedy = "name a new directory, or set run.unfinished to resume or archive"
        raise SettingsError(f"{setting}={path}: holds a run that has not ended; {remedy}")
    return True


def existing_part(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there already."""
    return next(part for part in (path, *path.absolute().parents) if part.exists())


def is_finished(path: Path) -> bool:
    """Whether `path` holds a run that has come to its own end."""
    try:
        result = read_run(path)["result"]
    except SettingsError:
        return False
    return result is not None and result["stop"] != INTERRUPTED


def archive(setting: str, path: Path) -> None:
    """Rename a run directory to the first free name beside it; raises a SettingsError if a process writes into it."""
    taken = RunDirectory(setting, path)
    path.rename(free_name(path))
    taken.close()


def free_name(path: Path) -> Path:
    """The first name beside `path` under which it can be archived."""
    names = (path.with_name(f"{path.name}.archived-{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _make_new(path: Path) -> Path:
    """A directory that was not there: of this name, or of a longer one for another run of the same second."""
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            path = path.with_name(path.name + "x")


def check_place(setting: str, path: Path, needed_bytes: int = 0) -> None:
    """Raise a SettingsError if a directory cannot be made or written there, or has no room."""
    existing = existing_part(path)
    is_place = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    require(is_place, setting, path, f"{existing} is not a directory that can be written; name another")
    free_bytes = shutil.disk_usage(existing).free
    rule = f"{free_bytes / 1e6:,.1f} MB are free, records and model take {needed_bytes / 1e6:,.1f} MB"
    require(free_bytes >= needed_bytes, setting, path, f"{rule}; free some, or name another directory")


def _refuse_other_kinds(setting: str, path: Path) -> None:
    """Folders where a run that resumes has files, or files where it has folders, stand in its way."""
    kinds = {RUN_FILE: False, METRICS_FILE: False, STOP_FILE: False, MODEL_DIRECTORY: True, LOGS_DIRECTORY: True}
    for name, is_folder in kinds.items():
        is_other = (path / name).exists() and (path / name).is_dir() != is_folder
        rule = f"its {name} is {'no' if is_folder else 'a'} directory; move it away, then resume"
        require(not is_other, setting, path, rule)
