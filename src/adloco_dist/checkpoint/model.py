"""The model that a run leaves, in a directory of its own; what ranks hold together, nobody ever has whole."""

import json
import os
from pathlib import Path

import torch

from adloco_dist.checkpoint.files import header
from adloco_dist.config import SettingsError
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.run.directory import MODEL_DIRECTORY
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError, check_part, digest_of, read_manifest, write_manifest
from adloco_dist.vectors import Deal, is_sharded, local

FILE_BYTES = 5_000_000_000
"""Maximum size of a file, as transformers have it."""
INDEX_FILE = "model.safetensors.index.json"


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
        _write_together(path, flat_model, objective)
    else:
        objective.save(flat_model.module, path)
    if shards.index == 0:
        write_manifest(path, {file.name: digest_of(file) for file in path.iterdir() if file.is_file()})
    return path


def check_model(setting: str, path: Path) -> None:
    """Compare the files of a model that a run has left with their manifest; without one there is nothing to compare.

    Raises:
        SettingsError: a file is not what the run wrote; it names `setting`, which named the model.
    """
    if not (path / MANIFEST_FILE).exists():
        return
    try:
        for name, part in read_manifest(path).items():
            check_part(path, name, part)
    except DamagedError as error:
        remedy = f"restore it, or remove {MANIFEST_FILE} there to take the model as it is"
        raise SettingsError(f"{setting}={path}: is not the model that the run has saved ({error}); {remedy}") from error


def _write_together(directory: Path, flat_model: FlatModel, objective: Objective) -> None:
    """Write the weights that the flat model points at as safetensors, every rank its parts at their places.

    Collective over the ranks that hold the model together, which share a file system.
    """
    from huggingface_hub import split_torch_state_dict_into_shards  # which takes a third of a second

    shards, module = flat_model.shards, flat_model.module
    is_first = shards.index == 0
    state = objective.saved_tensors(module)
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    split = split_torch_state_dict_into_shards(whole, max_shard_size=FILE_BYTES)
    places: dict[str, tuple[Path, int]] = {}  # the file that has a tensor, and its first byte there
    for file, held in split.filename_to_tensors.items():
        start_of_file, starts = header({name: whole[name] for name in held}, {"format": "pt"})
        places |= {name: (directory / file, len(start_of_file) + start) for name, start in starts.items()}
        if is_first:
            with (directory / file).open("wb") as stream:
                stream.write(start_of_file)
                stream.truncate(len(start_of_file) + sum(whole[name].nbytes for name in held))
    if is_first:
        objective.save_beside_weights(module, directory)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    shards.all_agree(True)  # the files are there
    for name, tensor in state.items():
        if is_sharded(tensor):
            deal = Deal.of(tensor.shape, len(shards.ranks))
            assert deal is not None
            _write(*places[name], local(tensor), deal, shards.index)
        elif is_first:
            _write(*places[name], tensor, Deal((1, *tensor.shape), 0, 1), 0)
    shards.all_agree(True)  # and whole


def _write(path: Path, start: int, part: torch.Tensor, deal: Deal, index: int) -> None:
    """Write a rank's part of a tensor whose first byte in the file is at `start`."""
    if not part.numel():
        return
    rows = part.detach().cpu().contiguous().view(torch.uint8).view(deal.num_rows, -1).numpy()
    with path.open("r+b") as file:  # not a mapped one, whose pages would count as memory of this process
        for number, row in enumerate(rows):
            file.seek(start + (number * deal.size + index) * row.nbytes)
            file.write(row)
        file.flush()
        os.fsync(file.fileno())
