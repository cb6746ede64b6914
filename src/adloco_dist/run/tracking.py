"""Weights & Biases as one more sink of the records."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from adloco_dist.config import SettingsError, TrackingMode, TrackingSettings
from adloco_dist.run.rows import Record


class WandbSink:
    """Logs every round under trainer<id>/..., and the result as the run's summary."""

    def __init__(
        self, tracking: TrackingSettings, directory: Path, config: dict[str, Any], run_id: str | None = None
    ) -> None:
        """
        Args:
            run_id: id of the run that resumes in Weights & Biases; None: a new one.
        """
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal belongs to the progress display
        self._run = wandb.init(
            project=tracking.project, name=directory.name, dir=directory, config=config, mode=_mode(tracking.mode),
            id=run_id, resume="allow",
        )  # fmt: skip

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            trainer = f"trainer{record['trainer']}"
            self._run.log(_flat(trainer, record), step=record["round"])

    def state(self) -> Record:
        return {"tracking_id": self._run.id}

    def close(self, result: Record | None) -> None:
        if result is not None:
            self._run.summary.update(result)
        self._run.finish(exit_code=0 if result is not None else 1)


def check_login() -> None:
    """
    Raises:
        SettingsError: records are to go to W&B while the run trains, and nobody is logged in there.
    """
    rule = "nobody is logged in to Weights & Biases; run `wandb login`, set WANDB_API_KEY, or use tracking=offline"
    if not _is_logged_in():
        raise SettingsError.of("tracking.mode", TrackingMode.online, rule)


def _mode(mode: TrackingMode) -> Any:
    """auto is online for those who are logged in, and offline for all others: nobody is asked anything."""
    if mode is not TrackingMode.auto:
        return mode.name
    return "online" if _is_logged_in() else "offline"


def _is_logged_in() -> bool:
    return bool(os.environ.get("WANDB_API_KEY")) or bool(wandb.login(prompt=False))


def _flat(prefix: str, record: Record) -> dict[str, float]:
    """The numbers of a nested record, by path."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(f"{prefix}/{key}", value)
        elif isinstance(value, int | float):
            flat[f"{prefix}/{key}"] = value
    return flat
