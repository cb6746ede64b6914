"""Statistics on the trainer's lowest rank, computed from the rows that every rank has of its workers."""

from collections.abc import Mapping

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.config import GradientNorm, Settings
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.trainer import Trainer
from adloco_dist.round.estimators.protocol import Measured


def measure_rows(
    rows: Mapping[int, torch.Tensor],
    sizes: Mapping[int, torch.Tensor],
    trainer: Trainer,
    layout: Layout,
    group: Group | None,
    settings: Settings,
    sketch_size: int | None,
) -> Measured:
    """Compute statistics from the inner products of all workers' rows.

    Args:
        rows: mean gradients of each worker's K chunks, or sketches of them, (K, width), by worker.
        sizes: sequences of each chunk, in fractions where padding makes them unequal, (K, 1), by worker.
    """
    num_chunks_each = len(next(iter(sizes.values())))
    is_streaming = settings.wire.is_streaming  # workers stand at points of their own
    if num_chunks_each * (1 if is_streaming else layout.num_workers(trainer.id)) < 2:
        return Measured()
    with_sizes = {worker: torch.cat([rows[worker], sizes[worker]], dim=1) for worker in rows}
    gathered, bytes_sent = gather_rows(with_sizes, trainer, layout, group)
    if gathered is None:
        return Measured(None, bytes_sent)
    plugin = settings.batching.gradient_norm is GradientNorm.plugin
    found = []
    for at_one_point in gathered.split(num_chunks_each) if is_streaming else [gathered]:
        chunks, all_sizes = at_one_point[:, :-1].double(), at_one_point[:, -1]
        found.append(statistics_from_gram(chunks @ chunks.T, all_sizes, plugin, sketch_size))
    return Measured(GradientStatistics.mean_of(found), bytes_sent)


def gather_rows(
    rows: Mapping[int, torch.Tensor], trainer: Trainer, layout: Layout, group: Group | None
) -> tuple[torch.Tensor | None, int]:
    """Gather all workers' rows, in the order of their ids, on the trainer's lowest rank.

    Each rank sends its rows once; an all-gather would send them to ranks that have no use for them.

    Args:
        rows: the rows of each worker on this rank, (K, width), by worker.

    Returns:
        (M K, width) or None, and the bytes that this rank sent.
    """
    if group is None:
        return torch.cat([rows[worker] for worker in sorted(rows)]), 0
    ranks = layout.ranks(trainer.id)
    workers_of = {rank: layout.workers_on(rank, trainer.id) for rank in ranks}
    max_workers = max(len(workers) for workers in workers_of.values())
    height, width = next(iter(rows.values())).shape
    own = torch.cat([rows[worker] for worker in sorted(rows)])
    padded = torch.cat([own, own.new_zeros(max_workers * height - len(own), width)])
    received = group.gather(padded)
    if not received:
        return None, padded.nbytes
    by_worker = {}
    for rank, of_rank in zip(ranks, received, strict=True):
        for position, worker in enumerate(workers_of[rank]):
            by_worker[worker] = of_rank[position * height : (position + 1) * height]
    return torch.cat([by_worker[worker] for worker in sorted(by_worker)]), 0


def relative_sizes(targets: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return what chunks weigh in the mean of their batch: targets over the batch's mean targets per sequence.

    Their sum is the number of sequences; without padding they are the chunks' numbers of sequences.
    """
    return targets * (num_sequences / targets.sum())
