"""Where a run resumes: the newest whole checkpoint, found and agreed on by all ranks, wherever its parts lie."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adloco_dist.checkpoint.files import CHECKPOINTS_DIRECTORY, number_in, part_suffixes, trainer_file, worker_file
from adloco_dist.checkpoint.resharding import Resharding
from adloco_dist.checkpoint.search import CheckpointReader, ReportLine, find
from adloco_dist.checkpoint.state import Origins, RunState
from adloco_dist.checkpoint.storage import StorageDomains, domains_of
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings, SettingsError, Unfinished
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.data.hub import split_subset
from adloco_dist.policy.layout import seat_nodes
from adloco_dist.policy.survivors import without_lost
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.run.directory import LOCK_FILE, free_name
from adloco_dist.run.manifest import DamagedError
from adloco_dist.schema import Entry
from adloco_dist.text import counted
from adloco_dist.vectors import shape_in_words

FIXED = (
    "seed", "precision", "model.", "data.", "pool.trainers", "pool.workers_per_trainer", "algorithm.averages",
    "inner.optimizer", "wire.fragments",
)  # fmt: skip
"""Settings (or sections) that make a checkpoint what it is: with others it would be another run, or no run at all."""
PLACES = {"data.train", "data.validation", "data.hub", "data.tokenizer", "model.warm_start"}
"""Fixed settings that say where something lies. What lies there is compared itself, a corpus and its tokenizer by their
digest; the weights of a warm start are the checkpoint's by then."""
HOW = {"model.attention", "model.compile", "model.gradient_checkpointing"}
"""Fixed settings that say how things are computed: with others, figures differ in their last digits from then on."""
FREE = ("run.", "tracking.", "profile.", "checkpoint.")
"""Settings (or sections) that have no part in what is computed."""
OF_CONTACT = ("cluster.interface", "cluster.timeout_seconds", "cluster.silence_seconds", "cluster.check_links")
"""Others that have none: how ranks reach and await each other."""


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from, and its state as it continues with these ranks."""

    reader: CheckpointReader
    state: RunState
    was_concurrent: bool | None
    """Whether instances computed concurrently; None where others are on a rank now."""
    num_plans_kept: int
    """Plans that repeat the run to the bit: those of the rounds before, or none where ranks or settings are others."""
    lacking: frozenset[tuple[int, int]] = frozenset()
    """The trainers and workers of the checkpoint whose state nobody has any more."""
    origins: Origins = field(default_factory=dict)
    """Which worker of the checkpoint each is, by trainer, None: it is new; none: the same."""

    def origin(self, trainer: int, worker: int) -> int | None:
        """Which worker of the checkpoint a worker is; None: it is new."""
        return self.origins[trainer][worker] if self.origins else worker


@contextmanager
def fresh_domains(runtime: Runtime, directory: Path, settings: Settings) -> Iterator[StorageDomains]:
    """Where a run that begins writes its checkpoints, while the block runs. Collective.

    Checkpoints of another run that are left there are archived: nodes may have directories of their own.
    """
    folder = directory / CHECKPOINTS_DIRECTORY
    with domains_of(runtime, folder, settings.checkpoint) as domains:
        with runtime.control.agreed():
            try:
                if runtime.rank == domains.volume and any(number_in(path.name) for path in folder.iterdir()):
                    folder.rename(free_name(folder))
                    folder.mkdir()
            except OSError as mistake:
                rule = f"{folder} cannot be written ({mistake.strerror}); move it away, or name another"
                raise SettingsError(f"run.directory={directory}: {rule}") from mistake
        yield domains


@contextmanager
def resumed(
    runtime: Runtime, settings: Settings, report_line: ReportLine, is_fitted: bool = False, may_lack: bool = False
) -> Iterator[ResumePoint | None]:
    """The checkpoint that the settings say to resume from, readable while the block runs; None: the run begins.

    Collective. Lines for the user go to `report_line`. If it `is_fitted`, there are as many workers as ranks. The state
    of some workers `may_lack`, which begin again.

    Raises:
        SettingsError: on all ranks, when the run there cannot resume with these settings.
    """
    run, control = settings.run, runtime.control
    if run.unfinished is not Unfinished.resume or run.directory is None:
        yield None
        return
    directory = Path(run.directory)
    folder = directory / CHECKPOINTS_DIRECTORY
    if not any(reply["there"] for reply in control.exchange({"there": folder.exists()})):
        if (directory / LOCK_FILE).exists():
            report_line(f"{directory} holds no checkpoints: it is archived, and the run starts from the beginning")
        yield None
        return
    with domains_of(runtime, folder, settings.checkpoint) as domains:
        newest = find(control, domains, report_line, may_lack)
        if newest is None:
            report_line(f"{directory} holds no whole checkpoint: the run starts from the beginning")
            yield None
            return
        reader, state = newest
        where, num_ranks = folder / reader.name, state.world_size * state.ranks_per_worker
        wanted = flatten(to_plain(settings))
        remarks = check_resumed(str(where), state.settings, wanted)
        seats = seat_nodes(runtime.nodes, settings.pool.ranks_per_worker)
        is_same = (num_ranks, state.world_size) == (runtime.world_size, len(seats))
        if settings.algorithm.is_data_parallel and not is_same:
            rule = f"algorithm=ddp has one worker per rank; start {num_ranks} ranks instead of {runtime.world_size}"
            raise SettingsError(f"run.directory={directory}: {rule}")
        for remark in remarks:
            report_line(remark)
        place = ", in the middle of a round" if state.schema.is_away else ""
        lacking = _lacking(state, reader)
        if lacking:
            report_line(f"nobody has the state of {counted(len(lacking), 'worker')}: they begin again at the anchor")
        if lacking and is_fitted and state.has_begun:
            layout = state.plan.layout
            gone = {trainer: [number for other, number in lacking if other == trainer] for trainer in layout.trainers}
            state = replace(state, plan=without_lost(state.plan, layout, gone))
        origins: Origins = {}
        num_workers = sum(map(state.plan.layout.num_workers, state.plan.layout.trainers))
        if is_fitted and not state.has_begun and num_workers != len(seats):
            state, origins = state.fitted(len(seats), partial(_held_by, runtime, state, reader))
            ranks = f"; {counted(num_workers, 'worker')} of {counted(num_ranks, 'rank')} become one for each rank"
        else:
            ranks = "" if is_same else f"; workers of {num_ranks} ranks are placed on {runtime.world_size}"
        report_line(f"resumes from {where}{place}{ranks}")
        was_concurrent = state.plan.is_concurrent if is_same else None
        placed = state.placed_on(seats, settings.pool.placement, is_same)
        is_unchanged = is_same and not differing(state.settings, wanted)
        num_plans = state.plan.round if is_unchanged else 0
        yield ResumePoint(reader, placed, was_concurrent, num_plans, lacking, origins)


def _lacking(state: RunState, reader: CheckpointReader) -> frozenset[tuple[int, int]]:
    """The trainers and workers of a checkpoint whose state is nowhere."""
    suffixes, layout = part_suffixes(state.ranks_per_worker), state.plan.layout
    return frozenset(
        (trainer, worker)
        for trainer in layout.trainers
        for worker in range(layout.num_workers(trainer))
        if not all(reader.holders[worker_file(trainer, worker, suffix)] for suffix in suffixes)
    )


def _held_by(runtime: Runtime, state: RunState, reader: CheckpointReader, trainer: int, worker: int) -> list[int]:
    """The seats on whose volume a worker's state lies."""
    volumes = reader.holders[worker_file(trainer, worker, part_suffixes(state.ranks_per_worker)[0])]
    size = runtime.ranks_per_worker
    return [seat for seat in range(runtime.num_seats) if reader.domains.of_rank[seat * size] in volumes]


def restore_pool(pool: LocalPool, resume_point: ResumePoint) -> None:
    """Give this rank's share of the pool the state of the checkpoint. Collective; raises a SettingsError on all ranks
    when a part does not fit the model, or cannot be read any more."""
    with pool.runtime.control.agreed():
        try:
            _restore(pool, resume_point)
        except (DamagedError, OSError) as mistake:
            where = resume_point.reader.domains.folder / resume_point.reader.name
            rule = "name the model that the run began with, or move the checkpoint away to resume from the one before"
            line = f"run.directory={where.parent.parent}: checkpoint {where.name}: {mistake}; {rule}"
            raise SettingsError(line) from mistake


def differing(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The settings with another value, of those that have a part in what is computed; both by dotted key. Data have
    digests of their own."""
    places = PLACES - {"model.warm_start"}
    return [
        key
        for key, value in wanted.items()
        if saved.get(key) != value and not key.startswith((*FREE, *OF_CONTACT)) and key not in places
    ]


def check_resumed(where: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One remark for each setting with another value than in the checkpoint; both by dotted key. Raises a SettingsError
    where the run cannot resume with such a setting."""
    remarks = []
    for key, value in wanted.items():
        before = saved.get(key)
        if before == value or key.startswith(FREE):
            continue
        is_place = bool(key in PLACES and value and before)
        if is_place and key == "data.hub" and saved.get("data.streaming"):
            # A stream's digest has the names and sizes of its files alone, so subset and revision must be the same.
            is_place = split_subset(str(value))[1:] == split_subset(str(before))[1:]
        if is_place:
            remarks.append(f"resumes with {key}={value} instead of {before}; what lies there must be the same")
            continue
        has_vector = key in ("inner.momentum", "outer.momentum", "outer.average_span")
        if (key.startswith(FIXED) and key not in HOW) or (has_vector and bool(before) != bool(value)):
            rule = f"the run in {where} was trained with {key}={before}; set it to that, or name a new directory"
            raise SettingsError(f"{key}={value}: {rule}")
        remarks.append(f"resumes with {key}={value} instead of {before}")
    return remarks


def _restore(pool: LocalPool, resume_point: ResumePoint) -> None:
    """Restore this rank's share; raises the errors that `restore_pool` turns into a line."""
    state, runtime = resume_point.state, pool.runtime
    for trainer_id, trainer in pool.trainers.items():
        file, saved = _read(pool, resume_point, state.schema.trainer, partial(trainer_file, trainer_id))
        _check_fit(file, saved, trainer.state())
        trainer.restore(saved)
        for worker in trainer.workers:
            origin = resume_point.origin(trainer_id, worker.id)
            if origin is None or (trainer_id, origin) in resume_point.lacking:
                plan, event = state.plan, state.next_event
                worker.begin_again(
                    trainer.anchor, plan.updates_before(event, trainer_id, worker.id) if state.has_begun else 0
                )
                continue
            file, saved = _read(pool, resume_point, state.schema.worker, partial(worker_file, trainer_id, origin))
            of_rank = {name: value for name, value in trainer.own_state().items() if name in saved}
            _check_fit(file, saved, worker.state(state.schema.is_away) | of_rank)
            worker.restore(saved, trainer.anchor)
            for name, value in of_rank.items():  # adds up what other ranks kept, where there are fewer now
                value += saved[name].to(value.device)
            if pool.estimator and all(entry.name in saved for entry in pool.estimator.ENTRIES):
                pool.estimator.restore((trainer_id, worker.id), saved)
    capacity = state.pool.capacities[runtime.seat] if state.pool and state.pool.capacities else None
    if capacity is not None:  # micro-batches of the same size: the same sums
        for slot in pool.slots:
            slot.flat_model.capacity = min(capacity, slot.flat_model.capacity or capacity)


def _read(
    pool: LocalPool, resume_point: ResumePoint, entries: Sequence[Entry], file_of: Callable[[str], str]
) -> tuple[str, Mapping[str, torch.Tensor]]:
    """This rank's tensors of a trainer or a worker, and the name of the file that has them, which `file_of` makes of
    the suffix of a part. Where another number of ranks held a worker, they are in several files: the first is named."""
    runtime, flat_model, read = pool.runtime, pool.flat_model, resume_point.reader.read
    files = [file_of(suffix) for suffix in part_suffixes(resume_point.state.ranks_per_worker)]
    if len(files) == runtime.ranks_per_worker:
        file = files[runtime.shard]
        return file, read(file)
    if flat_model.num_buffer_elements:
        raise DamagedError(f"{files[0]}: is of {len(files)} ranks a worker, and training changes buffers of this model")
    resharding = Resharding(
        flat_model.whole_layout, pool.settings.wire.fragments, len(files), runtime.ranks_per_worker, runtime.shard
    )
    return files[0], resharding.collect(files[0], entries, [read(file) for file in files])


def _check_fit(file: str, saved: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Whether every tensor that is wanted is there in its type and shape: a copy would convert and broadcast."""
    for name, tensor in wanted.items():
        if name not in saved:
            raise DamagedError(f"{file}: has no {name}")
        if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            present, needed = shape_in_words(saved[name]), shape_in_words(tensor)
            raise DamagedError(f"{file}: {name} is {present}, the model needs {needed}")
