"""Weights & Biases as a tracker."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from adloco_dist.config import TrackingMode
from adloco_dist.run.follow import AXES
from adloco_dist.run.rows import Record
from adloco_dist.run.tracking import newest_round_file

LONGEST_NAME = 128
"""Characters that Weights & Biases takes as the name of a run or of a group."""
DIGEST_LENGTH = 8


class WandbTracker:
    """Logs every round as a step, and the result as the run's summary."""

    def __init__(self, directory: Path, facts: Record, run_id: str) -> None:
        """
        Args:
            facts: the contents of run.json.
            run_id: id of the run in Weights & Biases; if it exists there, that run continues.
        """
        tracking = facts["settings"]["tracking"]
        self._run = wandb.init(
            project=tracking["project"], name=_shortened(tracking["name"] or directory.resolve().name),
            group=_shortened(tracking["group"]), tags=tracking["tags"], dir=directory, config=facts["settings"],
            mode=_mode(TrackingMode[tracking["mode"]]), id=run_id, resume="allow",
            allow_val_change=True,  # a run may resume with another budget
            # What it measures of a process, it measures of the rank that has started this one.
            settings=wandb.Settings(console="off", x_stats_pid=os.getppid()),
        )  # fmt: skip
        for axis in AXES:
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric="round")
        self._newest_file = newest_round_file(directory, run_id)
        self._newest = int(self._newest_file.read_text()) if self._newest_file.exists() else -1

    def write(self, round_number: int, values: Mapping[str, float]) -> None:
        """Log a round, unless an earlier start has: steps cannot be taken back, and a run that resumes repeats some."""
        if round_number > self._newest:
            self._run.log(dict(values), step=round_number)
            self._newest_file.write_text(str(round_number))

    def close(self, result: Record | None) -> None:
        if result is not None:
            self._run.summary.update(result)
        self._run.finish(exit_code=0 if result is not None else 1)


def is_logged_in() -> bool:
    """Whether there are credentials; they are not tried."""
    return bool(os.environ.get("WANDB_API_KEY")) or bool(wandb.login(prompt=False, verify=False))


def _mode(mode: TrackingMode) -> Any:
    """auto is online for those who are logged in, and offline for all others: nobody is asked anything."""
    if mode is not TrackingMode.auto:
        return mode.name
    return "online" if is_logged_in() else "offline"


def _shortened(name: str | None) -> str | None:
    """`name` within the limit; one that is too long ends in its digest, so that names stay different."""
    if name is None or len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:DIGEST_LENGTH]
    return f"{name[: LONGEST_NAME - DIGEST_LENGTH - 1]}-{digest}"
