"""The model that a run leaves, in a directory of its own."""

from pathlib import Path

import torch

from adloco_dist.config import SettingsError
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.run.directory import MODEL_DIRECTORY
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError, check_part, digest_of, read_manifest, write_manifest


def save_model(directory: Path, flat_model: FlatModel, weights: torch.Tensor, objective: Objective) -> Path:
    """Write the objective's model with `weights`; last comes a manifest of all its files, as in a checkpoint.

    Collective over the ranks that hold the model together.
    """
    path, shards = directory / MODEL_DIRECTORY, flat_model.shards
    flat_model.point_at(weights)
    path.mkdir(parents=True, exist_ok=True)
    if shards.index == 0:
        (path / MANIFEST_FILE).unlink(missing_ok=True)  # of a start that was killed here
    if shards.ranks:
        from adloco_dist.run.sharded_model import write_together

        write_together(path, flat_model, objective)
    else:
        objective.save(flat_model.module, path)
    if shards.index == 0:
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
