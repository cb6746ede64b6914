"""From a rank's share of the pool to the parts of a checkpoint, and back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from adloco_dist.config import Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.decisions.checkpointing import Mark
from adloco_dist.decisions.plan import PoolReport, RoundPlan
from adloco_dist.decisions.state import RunState
from adloco_dist.hosting import Rank
from adloco_dist.run.directory import METRICS_FILE
from adloco_dist.run.journal import Journal
from adloco_dist.run.parts import RECORDS_FILE, STATE_FILE, trainer_file, worker_file
from adloco_dist.run.writer import CheckpointWriter, Snapshot

ReadPart = Callable[[str], Mapping[str, torch.Tensor]]
"""The tensors of a part of the checkpoint that is resumed, by file name."""


class Checkpoints:
    """Saves what a rank holds; rank 0 adds what all ranks know."""

    def __init__(self, writer: CheckpointWriter, journal: Journal, directory: Path, settings: Settings) -> None:
        """
        Args:
            directory: of the run, where rank 0's records are.
            settings: of the run; made plain once, which takes longer than the copy of a small model.
        """
        self._writer, self._journal, self._directory = writer, journal, directory
        self._settings = flatten(to_plain(settings))

    @property
    def is_writing(self) -> bool:
        """Whether this rank has not finished the last one."""
        return self._writer.is_busy

    def save(self, rank: Rank, mark: Mark, plan: RoundPlan, pool: PoolReport | None, seconds: float) -> None:
        """Write a checkpoint in the background; returns when the state is copied.

        Args:
            mark: the checkpoint's number and place in the run.
            plan: of the last round that was begun.
            pool: what the next plan is decided from; None in the middle of the round.
        """
        contents: dict[str, bytes] = {}
        if rank.runtime.rank == 0:
            state = RunState(
                settings=self._settings,
                corpus=rank.splits.digest,
                world_size=rank.runtime.world_size,
                plan=replace(plan, last_checkpoint=mark),
                pool=pool,
                seconds=seconds,
                shards={id: shard.state() for id, shard in rank.shards.items()},
                journal=self._journal.state(),
            )
            contents[STATE_FILE] = json.dumps(state.to_message()).encode()
            if self._writer.has_several_volumes:  # the node of the records may be the one that is lost
                contents[RECORDS_FILE] = (self._directory / METRICS_FILE).read_bytes()
        self._writer.begin(mark, parts(rank, plan, is_midway=pool is None), contents)


def parts(rank: Rank, plan: RoundPlan, is_midway: bool) -> Snapshot:
    """This rank's files of a checkpoint: its workers, and the outer state of trainers that it speaks for.

    A trainer's outer state is equal on all its ranks, of which one writes it; trainers take different ones where they
    can. After an outer step workers stand at their anchor: their weights are written in the middle of a round alone.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for id, trainer in rank.trainers.items():
        ranks = plan.layout.ranks(id)
        if ranks[id % len(ranks)] == rank.runtime.rank:
            found[trainer_file(id)] = trainer.state()
        for worker in trainer.workers:
            found[worker_file(id, worker.id)] = worker.state(with_weights=is_midway)
    return found


def restore(rank: Rank, state: RunState, read: ReadPart) -> None:
    """Give this rank's share of the pool the state of a checkpoint.

    Raises:
        KeyError: the checkpoint is of another pool.
    """
    for id, trainer in rank.trainers.items():
        trainer.restore(read(trainer_file(id)))
        for worker in trainer.workers:
            worker.restore(read(worker_file(id, worker.id)), trainer.anchor)
    capacity = state.capacity(rank.runtime.rank)
    if capacity is not None:  # passes of the same size: the same sums
        for lane in rank.lanes:
            lane.flat_model.capacity = min(capacity, lane.flat_model.capacity or capacity)
