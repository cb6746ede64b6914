"""A rank's share of the pool, turned into the files of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import record_function

from adloco_dist.checkpoint.files import RECORDS_FILE, STATE_FILE, part_suffixes, trainer_file, worker_file
from adloco_dist.checkpoint.state import Midway, RunState, Schema
from adloco_dist.checkpoint.writer import CheckpointWriter, Snapshot
from adloco_dist.config import Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.policy.plan import CheckpointId, PoolReport, RoundPlan
from adloco_dist.pool.estimator import GradientEstimator
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.trainer import trainer_entries
from adloco_dist.pool.worker import leaves_of, moment_entries, own_entries
from adloco_dist.run.journal import Journal
from adloco_dist.run.rows import METRICS_FILE


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
        self, pool: LocalPool, checkpoint_id: CheckpointId, plan: RoundPlan, known: PoolReport | Midway, seconds: float
    ) -> None:
        """Write a checkpoint in the background; returns when the state is copied.

        Args:
            plan: the plan of the last round that was begun.
            known: what the next plan is decided from, or where in the middle of the round the run stands.
        """
        midway = known if isinstance(known, Midway) else None
        contents: dict[str, bytes] = {}
        if pool.runtime.rank == 0:
            state = RunState(
                settings=self._settings,
                schema=schema_of(pool, midway is not None),
                corpus=pool.splits.digest,
                world_size=pool.runtime.num_seats,
                plan=replace(plan, last_checkpoint=checkpoint_id),
                pool=known if isinstance(known, PoolReport) else None,
                midway=midway,
                seconds=seconds,
                shards={trainer: cursor.state_dict() for trainer, cursor in pool.cursors.items()},
                journal=self._journal.state(),
            )
            contents[STATE_FILE] = json.dumps(state.to_message()).encode()
            if self._writer.domains.buddy is not None:  # the node of the records may be the one that is lost
                contents[RECORDS_FILE] = (self._directory / METRICS_FILE).read_bytes()
        self._writer.begin(checkpoint_id, parts(pool, plan, midway is not None), contents)


def is_away(settings: Settings, is_midway: bool) -> bool:
    """Whether workers do not stand at their anchors, where they restart at the end of a round unless it is streamed."""
    return is_midway or settings.wire.is_streaming


def schema_of(pool: LocalPool, is_midway: bool) -> Schema:
    """What the ranks' files hold, the same for all trainers and workers."""
    settings, leaves = pool.settings, leaves_of(pool.flat_model, pool.settings.inner)
    of_worker = [*moment_entries(leaves, settings.inner), *own_entries(settings.wire)]
    of_trainer = trainer_entries(settings.outer, settings.wire)
    shared = tuple(entry for entry in of_trainer if entry.is_shared)
    estimated = GradientEstimator.ENTRIES if settings.batching.measures_gradients else ()
    kept = (*of_worker, *(entry for entry in of_trainer if not entry.is_shared), *estimated)
    return Schema(shared, tuple(entry for entry in kept if is_away(settings, is_midway) or not entry.is_progress))


def parts(pool: LocalPool, plan: RoundPlan, is_midway: bool) -> Snapshot:
    """This rank's files of a checkpoint: its workers, and the outer state of trainers that it speaks for.

    A trainer's outer state is equal on all its ranks, of which one writes it; trainers take different ones where they
    can. What a rank keeps of a trainer for itself is written with the first of its workers, zeros with the others.
    """
    runtime, away = pool.runtime, is_away(pool.settings, is_midway)
    suffix = part_suffixes(runtime.ranks_per_worker)[runtime.shard]
    files: dict[str, dict[str, torch.Tensor]] = {}
    for trainer_id, trainer in pool.trainers.items():
        ranks = plan.layout.ranks(trainer_id)
        if ranks[trainer_id % len(ranks)] == runtime.seat:
            files[trainer_file(trainer_id, suffix)] = trainer.state()
        for worker in trainer.workers:
            state, own = worker.state(away), trainer.own_state()
            is_first = worker is trainer.workers[0]
            state |= own if is_first else {name: torch.zeros_like(value) for name, value in own.items()}
            if away and trainer_id in pool.estimators:
                state |= pool.estimators[trainer_id].state(worker.id)
            files[worker_file(trainer_id, worker.id, suffix)] = state
    return files
