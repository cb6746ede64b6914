"""Reading a run directory after the run."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from adloco_dist.config import SettingsError
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.run.directory import METRICS_FILE, MODEL_DIRECTORY, RUN_FILE


def read_run(directory: Path) -> dict[str, Any]:
    """The contents of run.json.

    Raises:
        SettingsError: `directory` is no run directory.
    """
    path = directory / RUN_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(f"RUN={directory}: has no readable {RUN_FILE}; name a run directory") from error


def read_batches(source: str) -> Trajectory:
    """The total batches that a run took, by trainer and round.

    Args:
        source: a run directory, or its metrics.jsonl.

    Raises:
        SettingsError: it is missing, or not a run's records.
    """
    path = Path(source) / METRICS_FILE if Path(source).is_dir() else Path(source)
    batches: dict[int, list[int]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"batching.replay={source}: {path} cannot be read; name a run directory, or its {METRICS_FILE}"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if record["round"] == 0:  # before training
                continue
            trainer, batch = int(record["trainer"]), int(record["total_batch"])
            if record["round"] != len(batches.setdefault(trainer, [])) + 1 or batch < 1:
                raise ValueError("rounds must follow each other")
            batches[trainer].append(batch)
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"batching.replay={source}: line {number} is not the record of a next round with a total_batch; "
                f"name a run's own {METRICS_FILE}"
            ) from error
    if not batches:
        raise SettingsError(f"batching.replay={source}: holds no round; name a run that has trained")
    return batches


def load_model(directory: Path) -> PreTrainedModel:
    """The model that the run saved.

    Raises:
        SettingsError: the run saved none, for it did not end.
    """
    path = directory / MODEL_DIRECTORY
    if not (path / "config.json").is_file():
        raise SettingsError(f"RUN={directory}: has no {MODEL_DIRECTORY}/; the run has not ended, or is no run")
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, use_safetensors=True)
