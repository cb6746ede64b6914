"""Reading a run directory after the run."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from adloco_dist.config import SettingsError
from adloco_dist.run.directory import MODEL_DIRECTORY, RUN_FILE


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
