"""The model that a run leaves: a directory that transformers loads."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from adloco_dist.config import SettingsError
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.run.directory import MODEL_DIRECTORY
from adloco_dist.run.parts import MANIFEST_FILE, DamagedError, check_part, digest_of, read_manifest, write_manifest


def save_model(directory: Path, flat_model: FlatModel, weights: torch.Tensor, vocabulary: Vocabulary) -> Path:
    """Write `weights` as safetensors with its config, and beside it the tokenizer of the corpus, where it is known.

    Last comes a manifest with the size and the digest of every file, as in a checkpoint.
    """
    path = directory / MODEL_DIRECTORY
    (path / MANIFEST_FILE).unlink(missing_ok=True)  # of a start that was killed here
    flat_model.point_at(weights)
    model = flat_model.module
    assert isinstance(model, PreTrainedModel)
    # save_pretrained removes duplicates of tied tensors by storage; parameters that are views of one flat vector
    # would look tied, so it gets tensors of their own.
    model.save_pretrained(path, state_dict={name: value.clone() for name, value in model.state_dict().items()})
    if vocabulary.tokenizer is not None:
        vocabulary.tokenizer.save_pretrained(path)
    write_manifest(path, {file.name: digest_of(file) for file in path.iterdir() if file.is_file()})
    return path


def check_model(setting: str, path: Path) -> None:
    """Compare the files of a model that a run has left with their manifest; without one there is nothing to compare.

    Args:
        setting: what named it, for the error.
        path: the model's directory.

    Raises:
        SettingsError: a file is not what the run wrote.
    """
    if not (path / MANIFEST_FILE).exists():
        return
    try:
        for name, part in read_manifest(path).items():
            check_part(path, name, part)
    except DamagedError as error:
        remedy = f"restore it, or remove {MANIFEST_FILE} there to take the model as it is"
        raise SettingsError(f"{setting}={path}: is not the model that the run has saved ({error}); {remedy}") from error
