"""The model that a run has left."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import from_plain
from adloco_dist.data.corpora import Splits, load_corpus
from adloco_dist.run.directory import MODEL_DIRECTORY, read_run


def load_model(directory: Path, is_classifier: bool = False) -> PreTrainedModel:
    """The model that the run saved.

    Raises:
        SettingsError: the run saved none, for it did not end; or it cannot be read.
    """
    path = directory / MODEL_DIRECTORY
    if not (path / "config.json").is_file():
        raise SettingsError(f"RUN={directory}: has no {MODEL_DIRECTORY}/; the run has not ended, or is no run")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:  # safetensors only, and no code of the directory's own: reading a model never runs any
        auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
        return auto.from_pretrained(path, local_files_only=True, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        told = next(iter(str(error).splitlines()), "")
        raise SettingsError(f"RUN={directory}: its {MODEL_DIRECTORY}/ cannot be read ({told})") from error


def open_finished(directory: Path) -> tuple[Settings, PreTrainedModel, Splits]:
    """A run's settings, the model that it saved, and its corpus.

    Raises:
        SettingsError: no such run, no model, or another corpus than the run's on this machine.
    """
    facts = read_run(directory)
    settings = from_plain(facts["settings"])
    module = load_model(directory, settings.data.is_labelled)
    splits = load_corpus(settings.data, settings.seed)
    if splits.digest != facts["corpus"]["digest"]:
        told = f"was trained on {facts['corpus']['source']}; {splits.source} on this machine differ"
        raise SettingsError(f"RUN={directory}: {told}")
    return settings, module, splits
