"""A trainer or a rank by itself, for tests and benchmarks of one room without a pool around it."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import ClusterSettings, Device, Settings
from adloco_dist.data.order import permutation
from adloco_dist.data.shards import Shard
from adloco_dist.pool.lane import Lane, new_lane
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker

CPU = torch.device("cpu")


def lone_trainer(
    settings: Settings, module: nn.Module, num_sequences: int, workers: Sequence[int] = (0,), id: int = 0,
    device: torch.device = CPU, changing: Sequence[str] = (),
) -> tuple[Trainer, Lane]:  # fmt: skip
    """A trainer whose shard is range(num_sequences), and the lane that its workers take turns on.

    Args:
        changing: names of the module's buffers that training changes.
    """
    lane = new_lane(module, device, settings, changing)
    flat_model = lane.flat_model
    weights = flat_model.initial_weights()
    instances = [Worker(worker, weights.clone(), flat_model, settings.inner) for worker in workers]
    shard = Shard(permutation(num_sequences, settings.seed), settings.seed, id)
    return Trainer(id, instances, weights, flat_model, shard, settings), lane


@contextmanager
def lone_rank(device: Device) -> Iterator[Runtime]:
    """The only rank of a run, in this process."""
    with tempfile.TemporaryDirectory() as directory:
        place = Place(0, 1, 0, 1, 0, init_method=f"file://{Path(directory) / 'rendezvous'}")
        with started(ClusterSettings(device=device), place, join_store(place), StopRequest()) as runtime:
            yield runtime
