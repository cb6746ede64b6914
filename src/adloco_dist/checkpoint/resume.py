"""Where a run resumes: the newest whole checkpoint, found and agreed on by all ranks, wherever its parts lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adloco_dist.checkpoint.compatibility import check_resumed
from adloco_dist.checkpoint.parts import CHECKPOINTS_DIRECTORY, prune
from adloco_dist.checkpoint.retention import number_in
from adloco_dist.checkpoint.saving import restore
from adloco_dist.checkpoint.search import CheckpointReader, ReportLine, find
from adloco_dist.checkpoint.state import RunState
from adloco_dist.checkpoint.storage import StorageDomains, domains_of
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings, SettingsError, Unfinished
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.policy.layout import seat_nodes
from adloco_dist.round.local_pool import LocalPool
from adloco_dist.run.directory import LOCK_FILE, free_name
from adloco_dist.run.manifest import MANIFEST_FILE, DamagedError


@dataclass(frozen=True)
class ResumePoint:
    """What a run resumes from."""

    reader: CheckpointReader
    state: RunState
    """State of the run as it continues with these ranks."""
    is_same_layout: bool
    """Whether workers are placed where they were."""

    @property
    def was_concurrent(self) -> bool | None:
        """Whether instances computed concurrently; None where others are on a rank now."""
        return self.state.plan.is_concurrent if self.is_same_layout else None


@contextmanager
def fresh_domains(runtime: Runtime, directory: Path, settings: Settings) -> Iterator[StorageDomains]:
    """Where a run that begins writes its checkpoints, while the block runs. Collective.

    Checkpoints of another run, which may be left on nodes with directories of their own, are archived there.
    """
    folder = directory / CHECKPOINTS_DIRECTORY
    with domains_of(runtime, folder, lambda path: received(folder, path, settings)) as domains:
        error: SettingsError | None = None
        try:
            if runtime.rank == domains.mine and any(number_in(path.name) for path in folder.iterdir()):
                folder.rename(free_name(folder))
                folder.mkdir()
        except OSError as mistake:
            detail = f"{folder} cannot be written ({mistake.strerror}); move it away, or name another"
            error = SettingsError(f"run.directory={directory}: {detail}")
        runtime.control.agree(error)
        yield domains


@contextmanager
def resumed(runtime: Runtime, settings: Settings, report_line: ReportLine) -> Iterator[ResumePoint | None]:
    """The checkpoint that the settings say to resume from, readable while the block runs; None: the run begins.

    Collective.

    Args:
        report_line: takes lines for the user; on rank 0.

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
    with domains_of(runtime, folder, lambda path: received(folder, path, settings)) as domains:
        found = find(control, domains, report_line)
        if found is None:
            report_line(f"{directory} holds no whole checkpoint: the run starts from the beginning")
            yield None
            return
        reader, state = found
        where, num_ranks = folder / reader.name, state.world_size * state.ranks_per_worker
        remarks = check_resumed(str(where), state.settings, flatten(to_plain(settings)))
        seats = seat_nodes(runtime.nodes, settings.pool.ranks_per_worker)
        is_same = (num_ranks, state.world_size) == (runtime.world_size, len(seats))
        if settings.algorithm.is_data_parallel and not is_same:
            rule = f"algorithm=ddp has one worker per rank; start {num_ranks} ranks instead of {runtime.world_size}"
            raise SettingsError(f"run.directory={directory}: {rule}")
        for remark in remarks:
            report_line(remark)
        place = "" if state.pool else ", in the middle of the next"
        ranks = "" if is_same else f"; workers of {num_ranks} ranks are placed on {runtime.world_size}"
        report_line(f"resumes from {where}{place}{ranks}")
        yield ResumePoint(reader, state.placed_on(seats, settings.pool.placement, is_same), is_same)


def restore_pool(pool: LocalPool, resume_point: ResumePoint) -> None:
    """Give this rank's share of the pool the state of the checkpoint. Collective.

    Raises:
        SettingsError: on all ranks, when a part does not fit the model, or cannot be read any more.
    """
    error: SettingsError | None = None
    try:
        restore(pool, resume_point.state, resume_point.reader.read)
    except (DamagedError, OSError) as mistake:
        where = resume_point.reader.domains.folder / resume_point.reader.name
        rule = "name the model that the run began with, or move the checkpoint away to resume from the one before"
        error = SettingsError(f"run.directory={where.parent.parent}: checkpoint {where.name}: {mistake}; {rule}")
    pool.runtime.control.agree(error)


def received(folder: Path, path: str, settings: Settings) -> None:
    """Note that a file came from another node; with a manifest, older checkpoints are kept no longer here either."""
    if path.endswith(MANIFEST_FILE):
        prune(folder, settings.checkpoint)
