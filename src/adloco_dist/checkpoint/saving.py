"""A rank's share of the pool, turned into the files of a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch.profiler import record_function

from adloco_dist.checkpoint.files import RECORDS_FILE, STATE_FILE, Share, trainer_file, worker_file
from adloco_dist.checkpoint.state import Midway, RunState, Schema
from adloco_dist.checkpoint.writer import CheckpointWriter, Snapshot
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.data.protocols import Cursor, Splits
from adloco_dist.policy.plan import CheckpointId, PoolReport, RoundPlan
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer, trainer_entries
from adloco_dist.pool.worker import leaves_of, moment_entries, own_entries
from adloco_dist.run.journal import Journal
from adloco_dist.run.rows import METRICS_FILE
from adloco_dist.schema import Entry


class Estimator(Protocol):
    """What has seen gradients of a trainer's workers."""

    ENTRIES: ClassVar[tuple[Entry, ...]]

    def state(self, worker: int) -> dict[str, torch.Tensor]: ...

    def restore(self, worker: int, state: Mapping[str, torch.Tensor]) -> None: ...


class Held(Protocol):
    """What a rank holds of the pool, as far as it is saved."""

    @property
    def settings(self) -> Settings: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def flat_model(self) -> FlatModel: ...
    @property
    def trainers(self) -> Mapping[int, Trainer]: ...
    @property
    def slots(self) -> Sequence[ComputeSlot]: ...
    @property
    def cursors(self) -> Mapping[int, Cursor]: ...
    @property
    def splits(self) -> Splits: ...
    @property
    def estimators(self) -> Mapping[int, Estimator]: ...
    @property
    def estimator_entries(self) -> tuple[Entry, ...]: ...


class Checkpoints:
    """Saves what a rank holds; rank 0 adds what all ranks know."""

    def __init__(self, writer: CheckpointWriter, journal: Journal, directory: Path, settings: Settings) -> None:
        self._writer, self._journal, self._directory = writer, journal, directory
        self._settings = flatten(to_plain(settings))  # once: it takes longer than the copy of a small model

    @property
    def is_writing(self) -> bool:
        """Whether this rank has not finished the last checkpoint."""
        return self._writer.is_busy

    @record_function("checkpoint")
    def save(
        self, held: Held, checkpoint_id: CheckpointId, plan: RoundPlan, known: PoolReport | Midway, seconds: float
    ) -> None:
        """Write a checkpoint in the background; returns when the state is copied.

        Args:
            plan: the plan of the last round that was begun.
            known: what the next plan is decided from, or where in the middle of the round the run stands.
        """
        midway = known if isinstance(known, Midway) else None
        contents: dict[str, bytes] = {}
        if held.runtime.rank == 0:
            state = RunState(
                settings=self._settings,
                schema=schema_of(held, midway is not None),
                corpus=held.splits.digest,
                world_size=held.runtime.num_seats,
                plan=replace(plan, last_checkpoint=checkpoint_id),
                pool=known if isinstance(known, PoolReport) else None,
                midway=midway,
                seconds=seconds,
                shards={trainer: cursor.state_dict() for trainer, cursor in held.cursors.items()},
                journal=self._journal.state(),
            )
            contents[STATE_FILE] = json.dumps(state.to_message()).encode()
            if self._writer.domains.buddy is not None:  # the node of the records may be the one that is lost
                contents[RECORDS_FILE] = (self._directory / METRICS_FILE).read_bytes()
        self._writer.begin(checkpoint_id, parts(held, plan, midway is not None), contents)


def is_away(settings: Settings, is_midway: bool) -> bool:
    """Whether workers do not stand at their anchors, where they restart at the end of a round unless it is streamed."""
    return is_midway or settings.wire.is_streaming


def schema_of(held: Held, is_midway: bool) -> Schema:
    """What the ranks' files hold, the same for all trainers and workers."""
    settings, leaves = held.settings, leaves_of(held.flat_model, held.settings.inner)
    of_worker = [*moment_entries(leaves, settings.inner), *own_entries(settings.wire)]
    of_trainer = trainer_entries(settings.outer, settings.wire)
    shared = tuple(entry for entry in of_trainer if entry.is_shared)
    kept = (*of_worker, *(entry for entry in of_trainer if not entry.is_shared), *held.estimator_entries)
    return Schema(shared, tuple(entry for entry in kept if is_away(settings, is_midway) or not entry.is_progress))


def parts(held: Held, plan: RoundPlan, is_midway: bool) -> Snapshot:
    """This rank's files of a checkpoint: its workers, and the outer state of trainers that it speaks for.

    A trainer's outer state is equal on all its ranks, of which one writes it; trainers take different ones where they
    can. What a rank keeps of a trainer for itself is written with the first of its workers, zeros with the others.
    """
    runtime, away = held.runtime, is_away(held.settings, is_midway)
    shard = Share(runtime.shard, runtime.ranks_per_worker)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for trainer_id, trainer in held.trainers.items():
        ranks = plan.layout.ranks(trainer_id)
        if ranks[trainer_id % len(ranks)] == runtime.seat:
            files[trainer_file(trainer_id, shard)] = trainer.state()
        for worker in trainer.workers:
            state, own = worker.state(away), trainer.own_state()
            is_first = worker is trainer.workers[0]
            state |= own if is_first else {name: torch.zeros_like(value) for name, value in own.items()}
            if away and trainer_id in held.estimators:
                state |= held.estimators[trainer_id].state(worker.id)
            files[worker_file(trainer_id, worker.id, shard)] = state
    return files
