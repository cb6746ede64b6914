"""The model that a run leaves: a directory that transformers loads."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from adloco_dist.data.encoding import Vocabulary
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.run.directory import MODEL_DIRECTORY


def save_model(directory: Path, flat_model: FlatModel, weights: torch.Tensor, vocabulary: Vocabulary) -> Path:
    """Write `weights` as safetensors with its config, and beside it the tokenizer of the corpus, where it is known."""
    path = directory / MODEL_DIRECTORY
    flat_model.point_at(weights)
    model = flat_model.module
    assert isinstance(model, PreTrainedModel)
    # save_pretrained removes duplicates of tied tensors by storage; parameters that are views of one flat vector
    # would look tied, so it gets tensors of their own.
    model.save_pretrained(path, state_dict={name: value.clone() for name, value in model.state_dict().items()})
    if vocabulary.tokenizer is not None:
        vocabulary.tokenizer.save_pretrained(path)
    return path
