"""A trainer or a rank by itself, for tests and benchmarks of one package without a pool around it."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import ClusterSettings, Device, Settings
from adloco_dist.data.indexed import ShardCursor, permutation
from adloco_dist.data.protocols import SequenceTable
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.slot import ComputeSlot, new_slot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker

CPU = torch.device("cpu")


def lone_trainer(
    settings: Settings, objective: Objective, module: nn.Module, table: SequenceTable, workers: Sequence[int] = (0,),
    trainer_id: int = 0, device: torch.device = CPU, changing: Sequence[str] = (),
) -> tuple[Trainer, ComputeSlot]:  # fmt: skip
    """A trainer whose shard is the whole table, and the compute slot that its workers share.

    Args:
        changing: names of the module's buffers that training changes.
    """
    slot = new_slot(objective, module, device, settings, changing)
    flat_model = slot.flat_model
    weights = flat_model.initial_weights()
    instances = [Worker(worker, weights.clone(), flat_model, settings.inner, settings.wire) for worker in workers]
    shard = ShardCursor(table, permutation(table.num_sequences, settings.seed), settings.seed, trainer_id)
    return Trainer(trainer_id, instances, weights, flat_model, shard, settings, (0,)), slot


@contextmanager
def lone_rank(device: Device) -> Iterator[Runtime]:
    """The only rank of a run, in this process."""
    with tempfile.TemporaryDirectory() as directory:
        place = Place(0, 1, 0, 1, 0, init_method=f"file://{Path(directory) / 'rendezvous'}")
        with started(ClusterSettings(device=device), place, join_store(place), StopRequest()) as runtime:
            yield runtime
