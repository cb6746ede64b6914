"""The model that a run has left."""

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from adloco_dist.config import SettingsError
from adloco_dist.run.directory import MODEL_DIRECTORY


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
