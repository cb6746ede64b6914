"""A rank's share of the pool, turned into the parts of a checkpoint and restored from them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch.profiler import record_function

from adloco_dist.checkpoint.parts import RECORDS_FILE, STATE_FILE, Share, TensorKind, trainer_file, worker_file
from adloco_dist.checkpoint.resharding import Resharding
from adloco_dist.checkpoint.state import RunState
from adloco_dist.checkpoint.writer import CheckpointWriter, Snapshot
from adloco_dist.config import InnerOptimizer, Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.policy.checkpoints import CheckpointId
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.report import MergeReport
from adloco_dist.round.local_pool import LocalPool
from adloco_dist.run.directory import METRICS_FILE
from adloco_dist.run.journal import Journal
from adloco_dist.run.manifest import DamagedError

SCALARS = frozenset({"step", "loss_sum", "updates_done", "awaits", "num_targets", "num_sequences"})
"""Tensors of a worker that are numbers; all others are flat vectors, or parts of one."""
OF_STATISTICS = frozenset({"sketches", "chunk_targets"})
"""Vectors of other lengths: what was measured of a worker's first gradient."""
ReadPart = Callable[[str], Mapping[str, torch.Tensor]]
"""The tensors of a part of the checkpoint that is resumed, by file name."""


class Checkpoints:
    """Saves what a rank holds; rank 0 adds what all ranks know."""

    def __init__(self, writer: CheckpointWriter, journal: Journal, directory: Path, settings: Settings) -> None:
        """
        Args:
            directory: the run directory, where rank 0's records are.
            settings: the run's; made plain once, which takes longer than the copy of a small model.
        """
        self._writer, self._journal, self._directory = writer, journal, directory
        self._settings = flatten(to_plain(settings))

    @property
    def is_writing(self) -> bool:
        """Whether this rank has not finished the last checkpoint."""
        return self._writer.is_busy

    @record_function("checkpoint")
    def save(
        self, pool: LocalPool, checkpoint_id: CheckpointId, plan: RoundPlan, known: PoolReport | None, seconds: float,
        merge: MergeReport,
    ) -> None:  # fmt: skip
        """Write a checkpoint in the background; returns when the state is copied.

        Args:
            checkpoint_id: the checkpoint's number and place in the run.
            plan: the plan of the last round that was begun.
            known: what the next plan is decided from; None in the middle of the round.
            merge: in the middle of the round, what merges before it came to; rank 0's counts.
        """
        contents: dict[str, bytes] = {}
        if pool.runtime.rank == 0:
            state = RunState(
                settings=self._settings,
                corpus=pool.splits.digest,
                world_size=pool.runtime.num_seats,
                plan=replace(plan, last_checkpoint=checkpoint_id),
                pool=known,
                merge=merge,
                seconds=seconds,
                shards={trainer: cursor.state_dict() for trainer, cursor in pool.cursors.items()},
                journal=self._journal.state(),
            )
            contents[STATE_FILE] = json.dumps(state.to_message()).encode()
            if self._writer.has_several_domains:  # the node of the records may be the one that is lost
                contents[RECORDS_FILE] = (self._directory / METRICS_FILE).read_bytes()
        self._writer.begin(checkpoint_id, parts(pool, plan, is_midway=known is None), contents)


def parts(pool: LocalPool, plan: RoundPlan, is_midway: bool) -> Snapshot:
    """This rank's files of a checkpoint: its workers, and the outer state of trainers that it speaks for.

    A trainer's outer state is equal on all its ranks, of which one writes it; trainers take different ones where they
    can. After an outer step workers stand at their anchor: their weights are written in the middle of a round alone,
    unless fragments meet at different times. What a rank has not sent is written with the first of its workers.
    """
    wire, shard = pool.settings.wire, Share(pool.runtime.shard, pool.runtime.ranks_per_worker)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for trainer_id, trainer in pool.trainers.items():
        ranks = plan.layout.ranks(trainer_id)
        if ranks[trainer_id % len(ranks)] == pool.runtime.seat:
            found[trainer_file(trainer_id, shard)] = trainer.state()
        for worker in trainer.workers:
            state = worker.state(with_weights=is_midway or wire.is_streaming)
            if trainer.residual is not None:
                is_first = worker is trainer.workers[0]
                state["residual"] = trainer.residual if is_first else torch.zeros_like(trainer.residual)
            if is_midway and wire.is_streaming and trainer_id in pool.estimators:
                state |= pool.estimators[trainer_id].state(worker.id)
            found[worker_file(trainer_id, worker.id, shard)] = state
    return found


def needed_parts(state: RunState) -> dict[str, frozenset[str]]:
    """The files that a checkpoint must have beside its state, and the tensors of each; moments without their part."""
    inner = state.settings.get("inner.optimizer")
    moments = {"step", "exp_avg", "exp_avg_sq"} if inner != InnerOptimizer.sgd.name else set[str]()
    if inner == InnerOptimizer.sgd.name and state.settings.get("inner.momentum"):
        moments = {"momentum_buffer"}
    progress = {"weights", "loss_sum", "updates_done", "awaits", "num_targets"} if state.has_weights else set[str]()
    if state.has_weights and state.wire.is_delayed:
        progress.add("departed")
    of_worker = {"norms"} | moments | progress | ({"residual"} if state.wire.keeps_residual else set())
    beside = {"momentum": "outer.momentum", "mean_anchor": "outer.average_span"}
    of_trainer = {"anchor"} | {name for name, setting in beside.items() if state.settings.get(setting)}
    needed: dict[str, frozenset[str]] = {}
    layout = state.plan.layout
    for trainer, share in product(layout.trainers, Share.all_of(state.ranks_per_worker)):
        needed[trainer_file(trainer, share)] = frozenset(of_trainer)
        for worker in range(layout.num_workers(trainer)):
            needed[worker_file(trainer, worker, share)] = frozenset(of_worker)
    return needed


def vector_size(file: str, kinds: Mapping[str, TensorKind], needed: frozenset[str]) -> int | None:
    """The elements of the flat vectors in a part of a checkpoint; None: it holds none.

    Raises:
        DamagedError: a tensor is missing, or has another shape than the others.
    """
    sizes: dict[str, int] = {}
    for name, kind in kinds.items():
        vector = name.partition(".")[2] or name  # both parts of a moment add up to one vector
        sizes.setdefault(vector, 0)
        if len(kind.shape) > 1 or (vector in SCALARS) != (kind.shape == ()):
            raise DamagedError(f"{file}: {name} has the shape {list(kind.shape)}")
        sizes[vector] += sum(kind.shape)
    for name in sorted(needed - sizes.keys()):
        raise DamagedError(f"{file}: has no {name}")
    if "exp_avg" in sizes:  # of Muon's matrices there is another one instead
        matrices = sizes.pop("momentum_buffer", 0)
        sizes |= {name: sizes[name] + matrices for name in ("exp_avg", "exp_avg_sq") if name in sizes}
    found = {size for name, size in sizes.items() if name not in {"norms", "departed"} | SCALARS | OF_STATISTICS}
    if len(found) > 1:
        raise DamagedError(f"{file}: has vectors of {' and of '.join(map(str, sorted(found)))} elements")
    return found.pop() if found else None


def restore(pool: LocalPool, state: RunState, read: ReadPart) -> None:
    """Give this rank's share of the pool the state of a checkpoint.

    Raises:
        DamagedError: a part does not fit this pool, or this model.
        OSError: a part cannot be read.
    """
    for trainer_id, trainer in pool.trainers.items():
        file, saved = _read(pool, state, read, partial(trainer_file, trainer_id))
        trainer.restore(_fitting(file, saved, trainer.state()))
        for worker in trainer.workers:
            file, saved = _read(pool, state, read, partial(worker_file, trainer_id, worker.id))
            wanted = worker.state(state.has_weights)
            has_residual = trainer.residual is not None and state.wire.keeps_residual
            wanted |= {"residual": trainer.anchor} if has_residual else {}
            worker.restore(_fitting(file, saved, wanted), trainer.anchor)
            if trainer.residual is not None and has_residual:  # of other ranks' workers, too, where there are fewer now
                trainer.residual += saved["residual"].to(trainer.residual.device)
            if saved.keys() & OF_STATISTICS and trainer_id in pool.estimators:
                pool.estimators[trainer_id].restore(worker.id, saved)
    capacity = state.capacity(pool.runtime.seat)
    if capacity is not None:  # micro-batches of the same size: the same sums
        for slot in pool.slots:
            slot.flat_model.capacity = min(capacity, slot.flat_model.capacity or capacity)


def _read(
    pool: LocalPool, state: RunState, read: ReadPart, file_of: Callable[[Share], str]
) -> tuple[str, Mapping[str, torch.Tensor]]:
    """A file of a part and this rank's tensors of it, from several files where as many ranks held a worker."""
    runtime, was = pool.runtime, Share.all_of(state.ranks_per_worker)
    if len(was) == runtime.ranks_per_worker:
        file = file_of(was[runtime.shard])
        return file, read(file)
    file = file_of(was[0])
    whole, fragments = pool.flat_model.whole_layout, pool.settings.wire.fragments
    if pool.flat_model.num_buffer_elements:
        raise DamagedError(f"{file}: is of {len(was)} ranks a worker, and training changes buffers of this model")
    resharding = Resharding(whole, fragments, len(was), runtime.ranks_per_worker, runtime.shard)
    return file, resharding.collect(file, (read(file_of(share)) for share in was))


def _fitting(
    file: str, saved: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """`saved`, which has every tensor that is wanted, in its type and shape: a copy would convert and broadcast."""
    for name, tensor in wanted.items():
        if name not in saved:
            raise DamagedError(f"{file}: has no {name}")
        found, needed = ((list(one.shape), one.dtype) for one in (saved[name], tensor))
        if found != needed:
            raise DamagedError(
                f"{file}: {name} is {found[0]} of {found[1]}, the model needs {needed[0]} of {needed[1]}"
            )
    return saved
