"""What a rank works with, set up once: its share of the pool, and what is known before the first round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Algorithm, Settings, SettingsError
from adloco_dist.data.corpora import Splits
from adloco_dist.data.shards import Shard, deal, shard_sizes
from adloco_dist.decisions.batch import largest_local_batch
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.plan import Premises
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.decisions.switch import least
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.sketch import Sketch
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.estimate import GradientEstimator, new_estimator
from adloco_dist.round.gradient import data_parallel
from adloco_dist.round.probe import probe_capacity


@dataclass(frozen=True)
class Rank:
    """What this rank works with."""

    settings: Settings
    runtime: Runtime
    splits: Splits
    groups: Groups
    flat_model: FlatModel
    module: nn.Module
    """What computes the logits: the flat model's module, for algorithm=ddp in DistributedDataParallel."""
    trainers: Sequence[Trainer]
    sketch: Sketch
    estimators: Mapping[int, GradientEstimator]
    """By trainer; empty where the batch does not follow the gradients."""


def host(settings: Settings, runtime: Runtime, splits: Splits, module: nn.Module, layout: Layout) -> Rank:
    """Set up this rank's share of the pool: every trainer that has a worker here, all from the same weights.

    Collective.

    Raises:
        SettingsError: on all ranks, when not even one sequence fits on one of them.
    """
    flat_model = FlatModel(module, runtime.device, settings.precision)
    initial_weights = flat_model.initial_weights()
    shards = deal(splits.train.num_sequences, len(layout.trainers), settings.seed)
    trainers = [
        Trainer(
            id, layout.workers_on(runtime.rank, id), initial_weights, flat_model, Shard(shards[id], settings.seed, id),
            settings,
        )
        for id in layout.trainers_on(runtime.rank)
    ]  # fmt: skip
    sketch = Sketch(flat_model.num_elements, flat_model.dtype, flat_model.device)
    estimators = (
        {trainer.id: new_estimator(flat_model, sketch, settings) for trainer in trainers}
        if settings.measures_gradients
        else {}
    )
    # Once everything that takes memory is there, and before a backward pass does more than compute (ddp).
    _find_capacity(flat_model, trainers, layout, settings, runtime)
    groups = Groups(runtime.backend, settings.cluster.outer_seconds)
    groups.form(layout.ranks(id) for id in layout.trainers)
    forward = flat_model.module
    if settings.algorithm.name is Algorithm.ddp:
        (trainer,) = trainers
        forward = data_parallel(flat_model, trainer.workers[0], groups.of(layout.ranks(trainer.id)))
    return Rank(settings, runtime, splits, groups, flat_model, forward, trainers, sketch, estimators)


def find_premises(rank: Rank, layout: Layout, trajectory: Trajectory) -> Premises:
    """What the plans will stand on: the shards' sizes, and every trainer's batch limit from its ranks' capacities.

    Collective.
    """
    settings = rank.settings
    replies = rank.runtime.control.exchange({"capacity": rank.flat_model.capacity})
    limits = {
        trainer: settings.switch.batch_limit or least(*(replies[rank]["capacity"] for rank in layout.ranks(trainer)))
        for trainer in layout.trainers
    }
    sizes = dict(enumerate(shard_sizes(rank.splits.train.num_sequences, len(layout.trainers))))
    return Premises(layout, sizes, limits, trajectory)


def _find_capacity(
    flat_model: FlatModel, trainers: Sequence[Trainer], layout: Layout, settings: Settings, runtime: Runtime
) -> None:
    most = max(
        largest_local_batch(settings.batching, layout.num_workers(trainer.id), len(trainer.shard))
        for trainer in trainers
    )
    error = None
    try:
        flat_model.capacity = probe_capacity(flat_model, trainers, settings, most, runtime.ranks_on_device)
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
