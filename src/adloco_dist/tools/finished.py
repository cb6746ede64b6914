"""The model that a run has left."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from adloco_dist.checkpoint.model import check_model
from adloco_dist.config import Settings, SettingsError, refused, require
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.models import trial_losses
from adloco_dist.objective.own import WEIGHTS_FILE
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.objective.weights import auto_class, load_weights, misfit, num_stored, on_meta
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.capacity import available_bytes
from adloco_dist.pool.flat_model import FlatModel, vector_dtype
from adloco_dist.run.directory import MODEL_DIRECTORY
from adloco_dist.run.reading import read_run, settings_of

CPU = torch.device("cpu")


def load_model(
    directory: Path, settings: Settings, device: torch.device = CPU, num_vectors: int = 1, sharers: int = 1
) -> PreTrainedModel:
    """The model that the run saved, on the CPU; raises a SettingsError where the run did not end, or the model cannot
    be read, is damaged, or does not fit into memory.

    Args:
        device: where it will be used.
        num_vectors: vectors as large as the model that will be held at one time.
        sharers: processes that do the same on this machine.
    """
    path, is_labelled = directory / MODEL_DIRECTORY, settings.data.is_labelled
    rule = f"has no {MODEL_DIRECTORY}/; the run has not ended, or is no run"
    if (path / WEIGHTS_FILE).is_file():
        rule = f"its {MODEL_DIRECTORY}/ has no config.json; restore it, or load {WEIGHTS_FILE} into your own model"
    require((path / "config.json").is_file(), "RUN", directory, rule)
    check_model("RUN", path)
    with readable(directory, f"its {MODEL_DIRECTORY}/"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        num_parameters = ParameterCount.of(on_meta(config, auto_class(is_labelled).from_config)).total
        stored = num_stored(path)
    detail = f"has {stored:,} numbers, its config.json asks for {num_parameters:,} parameters"
    rule = f"the model.safetensors in its {MODEL_DIRECTORY}/ {detail}; restore both"
    require(not 0 < stored < num_parameters, "RUN", directory, rule)  # before as many are built
    needed = num_vectors * num_parameters * vector_dtype(settings.precision).itemsize
    memory = available_bytes(device, sharers)
    rule = f"its model takes {needed / 1e6:,.0f} MB here, and {memory / 1e6:,.0f} MB are available"
    require(needed <= memory, "RUN", directory, f"{rule}; use a larger machine")
    with readable(directory, f"its {MODEL_DIRECTORY}/"):
        module, loaded = load_weights(is_labelled, str(path), config, local_files_only=True, trust_remote_code=False)
        with torch.no_grad():
            trial_losses(module, is_labelled)
    if problem := misfit(loaded):
        rule = f"the weights in its {MODEL_DIRECTORY}/ do not fit its config.json: {problem}; restore both"
        raise SettingsError(f"RUN={directory}: {rule}")
    return module


@dataclass(frozen=True)
class FinishedRun:
    """What a run has left, and what it was trained on."""

    settings: Settings
    objective: LanguageObjective
    flat_model: FlatModel
    splits: TextSplits


def open_finished(directory: Path, device: torch.device, num_vectors: int = 2, sharers: int = 1) -> FinishedRun:
    """Read a run's settings, its corpus and the model that it saved (see `load_model`), which moves to `device`; raises
    a SettingsError where there is no such run, no model, or another corpus than the run's on this machine."""
    facts = read_run(directory)
    settings = settings_of(directory, facts)
    module = load_model(directory, settings, device, num_vectors, sharers)
    splits = load_corpus(settings.data, settings.seed)
    if splits.digest != facts["corpus"]["digest"]:
        detail = f"was trained on {facts['corpus']['source']}; {splits.source} on this machine differ"
        raise SettingsError(f"RUN={directory}: {detail}")
    _check_limits(directory, settings, module.config, splits)
    objective = LanguageObjective(settings, module.config, splits.vocabulary)
    set_up_arithmetic(settings, device)
    return FinishedRun(settings, objective, FlatModel(module, device, settings.precision), splits)


def readable(directory: Path, what: str) -> AbstractContextManager[None]:
    """Report a damaged file of a run, for which transformers raise many kinds of exceptions, by a SettingsError."""
    return refused(f"RUN={directory}: {what} cannot be read", "restore it")


def _check_limits(directory: Path, settings: Settings, config: PretrainedConfig, splits: TextSplits) -> None:
    """A config of its own, whose weights fit it, may still be too small for the corpus."""
    length = settings.data.sequence_length
    limits = {
        "vocab_size": (config.vocab_size, splits.vocabulary.size, "ids"),
        "max_position_embeddings": (getattr(config, "max_position_embeddings", None) or length, length, "tokens"),
        "num_labels": (config.num_labels, len(splits.labels or ()), "labels"),
    }
    for field, (has, needed, unit) in limits.items():
        rule = f"its model has {field}={has}, its corpus needs {needed} {unit}; restore its {MODEL_DIRECTORY}/"
        require(has >= needed, "RUN", directory, rule)
