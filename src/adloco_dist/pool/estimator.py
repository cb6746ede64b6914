"""Gradient statistics of a trainer, from sketches of chunks of its workers' first gradients in a round."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from msgspec.structs import replace

from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.report import RankReport
from adloco_dist.pool.gradient import GradientWatcher
from adloco_dist.pool.trainer import Trainer
from adloco_dist.schema import Entry, Kind


class GradientEstimator:
    """Watches trainers' first gradients in a round, of their workers on this rank.

    The accumulated gradient is sketched after each chunk of a batch; the differences are the chunks' own gradients.
    """

    ENTRIES: ClassVar[tuple[Entry, ...]] = (
        Entry("sketches", Kind.summed, is_progress=True),
        Entry("chunk_targets", Kind.summed, is_progress=True),
        Entry("num_sequences", Kind.equal, is_progress=True),
    )
    """What it keeps over an interruption of a round."""

    def __init__(self) -> None:
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

    def take(self, trainer: Trainer) -> dict[int, bytes]:
        """What was seen of a trainer's workers here, packed, which is forgotten. Collective over the ranks that hold a
        worker together; they all have the same."""
        packed = {}
        for worker in sorted(worker for trainer_id, worker in self._seen if trainer_id == trainer.id):
            seen = self._seen.pop((trainer.id, worker))
            joined = torch.cat([torch.stack(seen.sums), seen.sums[0].new_tensor(seen.num_targets)[:, None]], dim=1)
            trainer.flat_model.shards.sum(joined)  # of parts of the gradient, and of shares of the batch
            sums, targets = joined[:, :-1], joined[:, -1:]
            chunks = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
            means = chunks * (seen.num_sequences / targets)  # what was seen are sums over so many sequences
            rows = torch.cat([means, relative_sizes(targets, seen.num_sequences)], dim=1)
            packed[worker] = bytes([rows.element_size()]) + rows.numpy(force=True).tobytes()
        return packed


def with_statistics(reports: Sequence[RankReport], is_plugin: bool, is_streaming: bool) -> list[RankReport]:
    """The reports of all ranks with the statistics of what was seen of every trainer in place of it, in those of the
    trainers' lowest ranks.

    Args:
        is_plugin: leave the measured mean's own noise in (batching.gradient_norm=plugin).
        is_streaming: workers stand at points of their own, and each is measured by itself.
    """
    seen: dict[int, dict[int, bytes]] = {}
    for report in reports:
        for trainer, share in report.trainers.items():
            seen.setdefault(trainer, {}).update(share.measure.sketches)
    if not any(seen.values()):  # most rounds measure nothing
        return list(reports)
    found: list[RankReport] = []
    for report in reports:
        shares = {}
        for trainer, share in report.trainers.items():
            packed = seen.pop(trainer, {})  # its first report is its lowest rank's
            statistics, shared = _statistics_of(packed, is_plugin, is_streaming) if packed else (None, None)
            measure = replace(share.measure, sketches={}, statistics=statistics, shared_squared_norm=shared)
            shares[trainer] = replace(share, measure=measure)
        found.append(replace(report, trainers=shares))
    return found


def _statistics_of(
    packed: Mapping[int, bytes], is_plugin: bool, is_streaming: bool
) -> tuple[GradientStatistics | None, float | None]:
    """The statistics of what was seen of a trainer's workers, and what they share of the squared norm; None: nothing
    can be measured with one gradient."""
    workers = [_unpacked(packed[worker]) for worker in sorted(packed)]
    points = workers if is_streaming else [torch.cat(workers)]
    if len(points[0]) < 2:
        return None, None
    statistics, means = [], []
    for at_one_point in points:
        chunks, sizes = at_one_point[:, :-1].double(), at_one_point[:, -1]
        statistics.append(statistics_from_gram(chunks @ chunks.T, sizes, is_plugin, BUCKETS))
        means.append(sizes.double() @ chunks / sizes.sum())
    return GradientStatistics.mean_of(statistics), shared_squared_norm(torch.stack(means))


def _unpacked(content: bytes) -> torch.Tensor:
    """A worker's chunks, (chunks, BUCKETS + 1): their sketches, and their sizes."""
    dtype = torch.float32 if content[0] == 4 else torch.float64
    return torch.frombuffer(bytearray(content[1:]), dtype=dtype).view(-1, BUCKETS + 1)


def shared_squared_norm(means: torch.Tensor) -> float | None:
    """The mean inner product of two of these gradients, (points, elements), of different points and sequences: without
    their noise, the squared norm of what they have in common; None: there is one point."""
    count = len(means)
    if count < 2:
        return None
    return float(means.sum(0).square().sum() - means.square().sum()) / (count * (count - 1))


def relative_sizes(targets: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """What chunks weigh in the mean of their batch: targets over the batch's mean targets per sequence.

    They add up to the number of sequences; without padding they are the chunks' numbers of sequences.
    """
    return targets * (num_sequences / targets.sum())
