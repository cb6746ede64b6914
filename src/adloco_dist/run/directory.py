"""The run directory: chosen once, by rank 0, and used by one run only."""

import os
from datetime import datetime
from pathlib import Path

from adloco_dist.config import RunSettings, SettingsError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
MODEL_DIRECTORY = "model"


def choose_directory(run: RunSettings) -> Path:
    """The path that `run` names, or a new one under its root, named by date and time. Nothing is created.

    Raises:
        SettingsError: the directory holds another run or other files, or cannot be made or written.
    """
    if run.directory is None:
        setting, path = "run.root", Path(run.root) / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        while path.exists():  # another run of the same second
            path = path.with_name(path.name + "x")
    else:
        setting, path = "run.directory", Path(run.directory)
    if (path / RUN_FILE).exists():
        raise SettingsError(f"{setting}={path}: already holds a run; name a new directory, or leave it out")
    if path.is_dir() and any(path.iterdir()):
        raise SettingsError(f"{setting}={path}: holds other files; name a new or an empty directory")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise SettingsError(f"{setting}={path}: {existing} is not a directory that can be written; name another")
    return path
