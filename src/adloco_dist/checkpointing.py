"""From a rank's share of the pool to the parts of a checkpoint, and back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from adloco_dist.config import InnerOptimizer, Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.decisions.checkpointing import Mark
from adloco_dist.decisions.plan import PoolReport, RoundPlan
from adloco_dist.decisions.state import RunState
from adloco_dist.hosting import Rank
from adloco_dist.run.directory import METRICS_FILE
from adloco_dist.run.journal import Journal
from adloco_dist.run.parts import RECORDS_FILE, STATE_FILE, DamagedError, TensorKind, trainer_file, worker_file
from adloco_dist.run.writer import CheckpointWriter, Snapshot

SCALARS = frozenset({"step", "loss_sum", "updates_done", "num_targets"})
"""Tensors of a worker that are numbers; all others are flat vectors, or parts of one."""
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


def needed_parts(state: RunState) -> dict[str, frozenset[str]]:
    """The files that a checkpoint must have beside its state, and the tensors of each; moments without their part."""
    inner, is_midway = state.settings.get("inner.optimizer"), state.pool is None
    moments = {"step", "exp_avg", "exp_avg_sq"} if inner == InnerOptimizer.adamw.name else set[str]()
    if inner == InnerOptimizer.sgd.name and state.settings.get("inner.momentum"):
        moments = {"momentum_buffer"}
    of_worker = moments | ({"weights", "loss_sum", "updates_done", "num_targets"} if is_midway else set())
    of_trainer = {"anchor", "momentum"} if state.settings.get("outer.momentum") else {"anchor"}
    needed: dict[str, frozenset[str]] = {}
    for id, hosts in state.plan.layout.hosts.items():
        needed[trainer_file(id)] = frozenset(of_trainer)
        needed |= {worker_file(id, worker): frozenset(of_worker) for worker in range(len(hosts))}
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
    found = {size for name, size in sizes.items() if name not in SCALARS}
    if len(found) > 1:
        raise DamagedError(f"{file}: has vectors of {' and of '.join(map(str, sorted(found)))} elements")
    return found.pop() if found else None


def restore(rank: Rank, state: RunState, read: ReadPart) -> None:
    """Give this rank's share of the pool the state of a checkpoint.

    Raises:
        DamagedError: a part does not fit this pool, or this model.
        OSError: a part cannot be read.
    """
    for id, trainer in rank.trainers.items():
        file = trainer_file(id)
        trainer.restore(_fitting(file, read(file), trainer.state()))
        for worker in trainer.workers:
            file = worker_file(id, worker.id)
            worker.restore(_fitting(file, read(file), worker.state(with_weights=state.pool is None)), trainer.anchor)
    capacity = state.capacity(rank.runtime.rank)
    if capacity is not None:  # passes of the same size: the same sums
        for lane in rank.lanes:
            lane.flat_model.capacity = min(capacity, lane.flat_model.capacity or capacity)


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
