"""Gradient statistics of a trainer, from sketches of chunks of its workers' first gradients in a round."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from adloco_dist.averaging.group import Group
from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.report import MeasureReport
from adloco_dist.pool.gradient import GradientWatcher
from adloco_dist.pool.trainer import Trainer
from adloco_dist.schema import Entry, Kind


class GradientEstimator:
    """Measures trainers, from the first gradients of their workers on this rank.

    The accumulated gradient is sketched after each chunk of a batch; the differences are the chunks' own gradients.
    """

    ENTRIES: ClassVar[tuple[Entry, ...]] = (
        Entry("sketches", Kind.summed, is_progress=True),
        Entry("chunk_targets", Kind.summed, is_progress=True),
        Entry("num_sequences", Kind.equal, is_progress=True),
    )
    """What it keeps over an interruption of a round."""

    def __init__(self, is_plugin: bool, is_streaming: bool) -> None:
        """
        Args:
            is_plugin: leave the measured mean's own noise in (batching.gradient_norm=plugin).
            is_streaming: workers stand at points of their own, and each is measured by itself.
        """
        self._is_plugin, self._is_streaming = is_plugin, is_streaming
        self._seen: dict[tuple[int, int], GradientWatcher] = {}
        """By the ids of trainer and worker."""

    def watch(self, worker: tuple[int, int]) -> GradientWatcher:
        """The watcher of a worker's first update of the round; requested again where the update is repeated."""
        self._seen[worker] = GradientWatcher()
        return self._seen[worker]

    def state(self, worker: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Its entries for a worker; empty ones before the worker's first update of the round."""
        seen = self._seen.get(worker, GradientWatcher())
        return {
            "sketches": torch.cat(seen.sums) if seen.sums else torch.empty(0),
            "chunk_targets": torch.tensor(seen.num_targets, dtype=torch.int64),
            "num_sequences": torch.tensor(seen.num_sequences),
        }

    def restore(self, worker: tuple[int, int], state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` has returned for a worker."""
        if count := len(state["chunk_targets"]):
            sums, num_targets = list(state["sketches"].view(count, -1)), state["chunk_targets"].tolist()
            self._seen[worker] = GradientWatcher(sums, num_targets, int(state["num_sequences"]))

    def measure(self, trainer: Trainer, layout: Layout, group: Group | None) -> MeasureReport:
        """Exchange what was seen of a trainer, and forget it; the report has no seconds yet. Collective over the
        trainer's ranks."""
        rows = {}
        for worker in sorted(worker for trainer_id, worker in self._seen if trainer_id == trainer.id):
            seen = self._seen.pop((trainer.id, worker))
            joined = torch.cat([torch.stack(seen.sums), seen.sums[0].new_tensor(seen.num_targets)[:, None]], dim=1)
            trainer.flat_model.shards.sum(joined)  # of parts of the gradient, and of shares of the batch
            sums, targets = joined[:, :-1], joined[:, -1:]
            chunks = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
            means = chunks * (seen.num_sequences / targets)  # what was seen are sums over so many sequences
            rows[worker] = torch.cat([means, relative_sizes(targets, seen.num_sequences)], dim=1)
        num_chunks_each = len(next(iter(rows.values())))
        if num_chunks_each * (1 if self._is_streaming else layout.num_workers(trainer.id)) < 2:
            return MeasureReport()
        gathered, bytes_sent = gather_rows(rows, trainer.id, layout, group)
        if gathered is None:
            return MeasureReport(bytes_sent=bytes_sent)
        statistics, means = [], []
        for at_one_point in gathered.split(num_chunks_each) if self._is_streaming else [gathered]:
            chunks, sizes = at_one_point[:, :-1].double(), at_one_point[:, -1]
            statistics.append(statistics_from_gram(chunks @ chunks.T, sizes, self._is_plugin, BUCKETS))
            means.append(sizes.double() @ chunks / sizes.sum())
        shared = shared_squared_norm(torch.stack(means))
        return MeasureReport(GradientStatistics.mean_of(statistics), shared, bytes_sent=bytes_sent)


def shared_squared_norm(means: torch.Tensor) -> float | None:
    """The mean inner product of two of these gradients, (points, elements), of different points and sequences: without
    their noise, the squared norm of what they have in common; None: there is one point."""
    count = len(means)
    if count < 2:
        return None
    return float(means.sum(0).square().sum() - means.square().sum()) / (count * (count - 1))


def gather_rows(
    rows: Mapping[int, torch.Tensor], trainer: int, layout: Layout, group: Group | None
) -> tuple[torch.Tensor | None, int]:
    """Gather all workers' rows, in the order of their ids, on the trainer's lowest rank.

    Each rank sends its rows once, (K, width) for each worker; an all-gather would send them to ranks that have no use
    for them.

    Returns:
        (M K, width) or None, and the bytes that this rank sent.
    """
    rank_rows = torch.cat([rows[worker] for worker in sorted(rows)])
    if group is None:
        return rank_rows, 0
    if group.index > 0:
        group.send_and_receive([(group.ranks[0], rank_rows)], [])
        return None, rank_rows.nbytes
    by_worker, received = dict(rows), []
    for rank, seat in zip(group.ranks[1:], layout.ranks(trainer)[1:], strict=True):
        workers = layout.workers_on(seat, trainer)
        received.append((rank, rank_rows.new_empty(len(workers), *next(iter(rows.values())).shape)))
        by_worker |= zip(workers, received[-1][1], strict=True)
    group.send_and_receive([], received)
    return torch.cat([by_worker[worker] for worker in sorted(by_worker)]), 0


def relative_sizes(targets: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """What chunks weigh in the mean of their batch: targets over the batch's mean targets per sequence.

    They add up to the number of sequences; without padding they are the chunks' numbers of sequences.
    """
    return targets * (num_sequences / targets.sum())
