"""What can be refused before a run exists, from its settings and what lies on this machine: training, or a dry run."""

from pathlib import Path

from transformers import PretrainedConfig

from adloco_dist.config import Settings, SettingsError, Shards
from adloco_dist.data.corpora import Splits, load_corpus
from adloco_dist.data.streams import RowStreams
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.replay import Trajectory, check_trajectory
from adloco_dist.models import local_model, model_config
from adloco_dist.run.model import check_model
from adloco_dist.run.records import read_trajectory


def examine_corpus(settings: Settings, layout: Layout) -> Splits:
    """The corpus of a run that begins.

    Raises:
        SettingsError: it cannot be read, or is too small for the pool.
    """
    splits = load_corpus(settings.data, settings.seed)
    check_shards(layout, splits, settings.data.shards)
    return splits


def examine_model(settings: Settings, splits: Splits, reads_weights: bool = True) -> PretrainedConfig:
    """The shape of the model.

    Args:
        reads_weights: whether this process looks at those of a warm start; of several on one node, one does.

    Raises:
        SettingsError: there is no such model, or its files are damaged.
    """
    if settings.model.warm_start is not None and reads_weights:
        check_model("model.warm_start", Path(local_model(settings.model.warm_start)))
    return model_config(settings.model, splits.vocabulary, settings.data.sequence_length, splits.num_labels)


def examine_replay(settings: Settings, layout: Layout | None) -> Trajectory:
    """The batches and merges that are to be replayed; none where nothing is.

    Args:
        layout: of a run that begins; None: it goes on.

    Raises:
        SettingsError: they cannot be read, or are of another pool.
    """
    if settings.batching.replay is None:
        return Trajectory()
    trajectory = read_trajectory("batching.replay", settings.batching.replay)
    if layout is not None:
        check_trajectory(settings, layout, trajectory)
    return trajectory


def check_shards(layout: Layout, splits: Splits, policy: Shards) -> None:
    """Every trainer's shard must hold a sequence for each of its workers; larger batches are capped at the shard.

    Raises:
        SettingsError: it does not.
    """
    num_parts, workers = 1 if policy is Shards.shared else len(layout.trainers), layout.num_workers(0)
    if isinstance(splits.train, RowStreams):
        splits.train.check_parts(num_parts * workers)
        return
    smallest = splits.train.num_sequences // num_parts
    if smallest < workers:
        raise SettingsError(
            f"pool.workers_per_trainer={workers}: a trainer's shard has {smallest} sequences "
            f"({splits.train.num_sequences} in {num_parts} shards), less than one for each worker; "
            "use more text, shorter sequences, fewer trainers or workers"
        )
