"""Checkpoints of a rank's share of the pool, written in the background: training waits only for a copy."""

import json
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store
from torch.profiler import record_function

from adloco_dist.averaging.checks import is_of_another
from adloco_dist.checkpoint.files import (
    RECORDS_FILE,
    STATE_FILE,
    StagingBuffer,
    part_suffixes,
    prune,
    trainer_file,
    worker_file,
)
from adloco_dist.checkpoint.state import RunState, Schema
from adloco_dist.checkpoint.storage import StorageDomains
from adloco_dist.cluster.heartbeat import patient_client
from adloco_dist.config import CheckpointSettings, Settings
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.messages import decode, encode
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import CheckpointId, PoolReport, RoundPlan
from adloco_dist.policy.report import MergeReport
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.trainer import trainer_entries
from adloco_dist.pool.worker import leaves_of, moment_entries, own_entries
from adloco_dist.run.journal import Journal
from adloco_dist.run.manifest import MANIFEST_FILE, Part, write_content, write_manifest
from adloco_dist.run.rows import METRICS_FILE
from adloco_dist.text import first_line, reason

log = logging.getLogger(__name__)
COPY_SHARE = 0.25
"""Of a link, which copies on another node may take while averages travel: at its full rate they push these aside."""
Snapshot = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by file and name."""


class Checkpoints:
    """Saves what a rank holds of the pool; rank 0 adds what all ranks know."""

    def __init__(self, writer: "CheckpointWriter", journal: Journal, directory: Path, settings: Settings) -> None:
        self._writer, self._journal, self._directory = writer, journal, directory
        self._settings = flatten(to_plain(settings))  # once: it takes longer than the copy of a small model

    @property
    def is_writing(self) -> bool:
        """Whether this rank has not finished the last checkpoint."""
        return self._writer.is_busy

    @record_function("checkpoint")
    def save(
        self,
        pool: LocalPool,
        checkpoint_id: CheckpointId,
        plan: RoundPlan,
        merge: MergeReport,
        found: PoolReport | None,
        seconds: float,
        interrupted_at: int | None = None,
    ) -> None:
        """Write a checkpoint in the background; returns when the state is copied.

        Args:
            plan: that of the round which has begun.
            merge: what the merges before it came to.
            found: what the next plan is decided from.
            seconds: time on rank 0's clock since the first round began.
            interrupted_at: the event at which the round goes on; None: no update of it was taken.
        """
        is_away = interrupted_at is not None or pool.settings.wire.is_streaming
        contents: dict[str, bytes] = {}
        if pool.runtime.rank == 0:
            state = RunState(
                settings=self._settings,
                schema=schema_of(pool, is_away),
                corpus=pool.splits.digest,
                world_size=pool.runtime.num_seats,
                plan=replace(plan, last_checkpoint=checkpoint_id),
                next_event=interrupted_at or 0,
                has_begun=interrupted_at is not None,
                merge=merge,
                pool=found,
                seconds=seconds,
                shards={trainer: cursor.state_dict() for trainer, cursor in pool.cursors.items()},
                journal=self._journal.state(),
            )
            contents[STATE_FILE] = json.dumps(state.to_message()).encode()
            if self._writer.domains.buddy is not None:  # the node of the records may be the one that is lost
                contents[RECORDS_FILE] = (self._directory / METRICS_FILE).read_bytes()
        self._writer.begin(checkpoint_id, parts(pool, plan.layout, is_away), contents)


def schema_of(pool: LocalPool, is_away: bool) -> Schema:
    """What the ranks' files hold, the same for all trainers and workers.

    Workers are away from their anchors in the middle of a round, and where averages are streamed.
    """
    settings, leaves = pool.settings, leaves_of(pool.flat_model, pool.settings.inner)
    of_worker = [*moment_entries(leaves, settings.inner), *own_entries(settings.wire)]
    of_trainer = trainer_entries(settings.outer, settings.wire)
    shared = tuple(entry for entry in of_trainer if entry.is_shared)
    estimated = pool.estimator.ENTRIES if pool.estimator else ()
    kept = (*of_worker, *(entry for entry in of_trainer if not entry.is_shared), *estimated)
    return Schema(shared, tuple(entry for entry in kept if is_away or not entry.is_progress))


def parts(pool: LocalPool, layout: Layout, is_away: bool, of_each_volume: Sequence[int] = ()) -> Snapshot:
    """This rank's files of a checkpoint: its workers, and the outer state of trainers that it speaks for.

    A trainer's outer state is equal on all its ranks, of which one writes it; trainers take different ones where they
    can. What a rank keeps of a trainer for itself is written with the first of its workers, zeros with the others.

    Args:
        layout: where the workers are.
        of_each_volume: the volume of every rank, on each of which one writes the outer state; none: one does.
    """
    runtime = pool.runtime
    suffix = part_suffixes(runtime.ranks_per_worker)[runtime.shard]
    files: dict[str, dict[str, torch.Tensor]] = {}
    for trainer_id, trainer in pool.trainers.items():
        seats = layout.ranks(trainer_id)
        if of_each_volume:
            volumes = [of_each_volume[seat * runtime.ranks_per_worker] for seat in seats]
            is_writer = seats[volumes.index(of_each_volume[runtime.rank])] == runtime.seat
        else:
            is_writer = seats[trainer_id % len(seats)] == runtime.seat
        if is_writer:
            files[trainer_file(trainer_id, suffix)] = trainer.state()
        for worker in trainer.workers:
            state, of_rank = worker.state(is_away), trainer.own_state()
            is_first = worker is trainer.workers[0]
            state |= of_rank if is_first else {name: torch.zeros_like(value) for name, value in of_rank.items()}
            if is_away and pool.estimator:
                state |= pool.estimator.state((trainer_id, worker.id))
            files[worker_file(trainer_id, worker.id, suffix)] = state
    return files


class CheckpointWriter:
    """Writes this rank's parts, and on rank 0 the manifest once all ranks have written theirs.

    Ranks notify rank 0 through the store, from the background, so that a checkpoint is whole as soon as its last part
    is, not only after the next round. What cannot be written leaves the last whole checkpoint where it is.
    """

    def __init__(
        self,
        domains: StorageDomains,
        store: Store,
        world_size: int,
        settings: CheckpointSettings,
        report_line: Callable[[str], None],
        link_bytes_per_second: float | None = None,
    ) -> None:
        """
        Args:
            report_line: takes one line for the user, on rank 0, from any thread.
            link_bytes_per_second: of this node's slowest link, of which copies take a part while training needs it;
                None: it is not known, and they take what they get.
        """
        self._copy_rate = None if link_bytes_per_second is None else COPY_SHARE * link_bytes_per_second
        self._is_awaited = threading.Event()
        self.domains, self._settings, self._report_line = domains, settings, report_line
        self._store = patient_client(store)
        self._world_size = world_size
        # One thread for the whole run: a new one must get a turn on cores that train before start() returns.
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._buffers: dict[str, StagingBuffer] = {}
        self.newest: str | None = None
        """Name of the newest whole checkpoint of this start, on rank 0; None: none yet, or another rank."""

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def begin(self, checkpoint_id: CheckpointId, parts: Snapshot, contents: Mapping[str, bytes]) -> None:
        """Copy `parts`, the tensors of this rank's files, and write them and its other files, `contents`, in the
        background. Tensors may change as soon as this returns."""
        self.wait()
        self._buffers = {file: self._buffers.get(file, StagingBuffer()) for file in parts}
        for file, tensors in parts.items():
            self._buffers[file].fill(tensors)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._writing = self._background.submit(self._write, checkpoint_id, self._buffers, contents)

    def wait(self) -> None:
        """Wait until this rank's work on the last checkpoint is done."""
        if self._writing:
            self._is_awaited.set()
            self._writing.result()
            self._is_awaited.clear()

    def _write(
        self, checkpoint_id: CheckpointId, images: Mapping[str, StagingBuffer], contents: Mapping[str, bytes]
    ) -> None:
        folder = self.domains.folder / checkpoint_id.name
        report: dict[str, object] = {}
        try:
            written = {file: buffer.write(folder / file) for file, buffer in images.items()}
            written |= {file: write_content(folder / file, content) for file, content in contents.items()}
            report["parts"] = encode(written)
        except Exception as error:  # whatever it is, rank 0 must hear of it
            log.exception("checkpoint %s", checkpoint_id.name)
            report["error"] = _in_words(error)
            written = {}
        if self._settings.copies and (buddy := self.domains.buddy) is not None:
            try:
                for file in written:
                    path = f"{folder.name}/{file}"
                    self.domains.send(buddy, path, folder / file, self._copy_rate, self._is_awaited.is_set)
            except OSError as error:  # the part is still where it was written
                report["note"] = f"without its copy on another node: {_in_words(error)}"
        try:
            self._store.set(_key(checkpoint_id, self.domains.rank), json.dumps(report))
            if self.domains.rank == 0:
                self._conclude(checkpoint_id, folder)
        except Exception as error:  # the store is gone, or worse
            is_gone = isinstance(error, RuntimeError) and is_of_another(error)
            log.error("checkpoint %s: %s", checkpoint_id.name, first_line(error), exc_info=None if is_gone else error)

    def _conclude(self, checkpoint_id: CheckpointId, folder: Path) -> None:
        """Write the manifest on all volumes, or report why there is none."""
        manifest: dict[str, Part] = {}
        errors: list[str] = []
        for rank in range(self._world_size):
            report = json.loads(self._store.get(_key(checkpoint_id, rank)))
            self._store.delete_key(_key(checkpoint_id, rank))
            manifest |= decode(dict[str, Part], report.get("parts", {}))
            errors += [f"rank {rank}: {report['error']}"] if "error" in report else []
            if "note" in report:
                self._report_line(f"checkpoint {checkpoint_id.name}, rank {rank}: {report['note']}")
        try:
            if not errors:
                write_manifest(folder, manifest)
        except OSError as error:
            errors.append(f"rank 0: {_in_words(error)}")
        if errors:
            kept = f"the newest whole one is {self.newest}" if self.newest else "there is none yet"
            self._report_line(f"checkpoint {checkpoint_id.name} could not be written, {kept}: {errors[0]}")
            shutil.rmtree(folder, ignore_errors=True)  # all ranks have ended their part: room for what else is written
            return
        self.newest = checkpoint_id.name
        for domain in self.domains.volumes:
            if domain != self.domains.volume:
                try:
                    self.domains.send(domain, f"{folder.name}/{MANIFEST_FILE}", folder / MANIFEST_FILE)
                except OSError as error:
                    self._report_line(f"checkpoint {checkpoint_id.name}: {_in_words(error)}")
        prune(self.domains.folder, self._settings)
        log.info("checkpoint %s is whole", checkpoint_id.name)


def _key(checkpoint_id: CheckpointId, rank: int) -> str:
    return f"checkpoint/{checkpoint_id.name}/{rank}"


def _in_words(error: Exception) -> str:
    return f"{socket.gethostname()}: {reason(error)}"
