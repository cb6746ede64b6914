"""A trainer by itself, for tests and benchmarks of one room without a pool around it."""

from collections.abc import Sequence

import torch
from torch import nn

from adloco_dist.config import Settings
from adloco_dist.data.order import permutation
from adloco_dist.data.shards import Shard
from adloco_dist.pool.lane import Lane, new_lane
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker


def lone_trainer(
    settings: Settings, module: nn.Module, num_sequences: int, workers: Sequence[int] = (0,), id: int = 0,
    changing: Sequence[str] = (),
) -> tuple[Trainer, Lane]:  # fmt: skip
    """A trainer on the CPU whose shard is range(num_sequences), and the lane that its workers take turns on.

    Args:
        changing: names of the module's buffers that training changes.
    """
    lane = new_lane(module, torch.device("cpu"), settings, changing)
    flat_model = lane.flat_model
    weights = flat_model.initial_weights()
    instances = [Worker(worker, weights.clone(), flat_model, settings.inner) for worker in workers]
    shard = Shard(permutation(num_sequences, settings.seed), settings.seed, id)
    return Trainer(id, instances, weights, flat_model, shard, settings), lane
