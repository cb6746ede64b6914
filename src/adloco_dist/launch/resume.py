"""Where a run goes on: the newest whole checkpoint, found and agreed on by all ranks, wherever its parts lie."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adloco_dist.checkpointing import restore
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.volumes import Volumes, volumes_of
from adloco_dist.config import Algorithm, Concurrency, Settings, SettingsError, Unfinished, require
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.decisions.checkpointing import check_resumed, number_in
from adloco_dist.decisions.state import RunState
from adloco_dist.hosting import Rank
from adloco_dist.launch.nodes import check_restarts
from adloco_dist.launch.search import Archive, Tell, find
from adloco_dist.run.directory import LOCK_FILE, free_name, is_finished
from adloco_dist.run.parts import CHECKPOINTS_DIRECTORY, MANIFEST_FILE, DamagedError, prune


@dataclass(frozen=True)
class Source:
    """What a run goes on from."""

    archive: Archive
    state: RunState
    """As it goes on with these ranks."""
    is_same_layout: bool
    """Whether workers are hosted where they were."""


def check_restarts_of_rank(settings: Settings) -> None:
    """Under torchrun --max-restarts, the next start must find what this one leaves.

    Raises:
        SettingsError: it would not.
    """
    check_restarts(settings, _max_restarts())


def check_store_of_restarts() -> None:
    """And nothing else: before this rank looks into a store that the last start may have left.

    Raises:
        SettingsError: it would.
    """
    restarts = _max_restarts()
    keeps_store = restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rule = "torchrun would keep its store, with what the last start left there"
    remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"
    require(not keeps_store, "--max-restarts", restarts, f"{rule}; {remedy}")


def is_elastic() -> bool:
    """Whether torchrun starts the ranks again when one fails, or nodes come and go."""
    return _max_restarts() > 0


def _max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def has_ended(control: ControlPlane, settings: Settings) -> bool:
    """Whether the run that is to go on has come to its own end, as who starts it again and again may not know."""
    run = settings.run
    ended = run.unfinished is Unfinished.resume and run.directory is not None and is_finished(Path(run.directory))
    return any(reply["ended"] for reply in control.exchange({"ended": ended}))


@contextmanager
def fresh_volumes(runtime: Runtime, directory: Path, settings: Settings) -> Iterator[Volumes]:
    """Where a run that begins writes its checkpoints, while the block runs. Collective.

    Checkpoints of another run, which may be left on nodes with directories of their own, are set aside there.
    """
    folder = directory / CHECKPOINTS_DIRECTORY
    with volumes_of(runtime, folder, lambda path: received(folder, path, settings)) as volumes:
        error: SettingsError | None = None
        try:
            if runtime.rank == volumes.mine and any(number_in(path.name) for path in folder.iterdir()):
                folder.rename(free_name(folder))
                folder.mkdir()
        except OSError as mistake:
            told = f"{folder} cannot be written ({mistake.strerror}); move it away, or name another"
            error = SettingsError(f"run.directory={directory}: {told}")
        runtime.control.agree(error)
        yield volumes


@contextmanager
def resumed(runtime: Runtime, settings: Settings, tell: Tell) -> Iterator[Source | None]:
    """The checkpoint that the settings say to go on from, readable while the block runs; None: the run begins.

    Collective.

    Args:
        tell: takes lines for the user; on rank 0.

    Raises:
        SettingsError: on all ranks, when the run there cannot go on with these settings.
    """
    run, control = settings.run, runtime.control
    if run.unfinished is not Unfinished.resume or run.directory is None:
        yield None
        return
    directory = Path(run.directory)
    folder = directory / CHECKPOINTS_DIRECTORY
    if not any(reply["there"] for reply in control.exchange({"there": folder.exists()})):
        if (directory / LOCK_FILE).exists():
            tell(f"{directory} holds no checkpoints: it is set aside, and the run begins anew")
        yield None
        return
    with volumes_of(runtime, folder, lambda path: received(folder, path, settings)) as volumes:
        found = find(control, volumes, tell)
        if found is None:
            tell(f"{directory} holds no whole checkpoint: the run begins anew")
            yield None
            return
        archive, state = found
        where, num_ranks = folder / archive.name, state.world_size
        remarks = check_resumed(str(where), state.settings, flatten(to_plain(settings)))
        is_same = num_ranks == runtime.world_size
        if settings.algorithm.name is Algorithm.ddp and not is_same:
            rule = f"algorithm=ddp has one worker per rank; start {num_ranks} ranks instead of {runtime.world_size}"
            raise SettingsError(f"run.directory={directory}: {rule}")
        for remark in remarks:
            tell(remark)
        place = "" if state.pool else ", in the middle of the next"
        ranks = "" if is_same else f"; workers of {num_ranks} ranks are hosted on {runtime.world_size}"
        tell(f"goes on from {where}{place}{ranks}")
        yield Source(archive, state.hosted_on(runtime.nodes, settings.pool.placement), is_same)


def go_on(rank: Rank, source: Source) -> None:
    """Give this rank's share of the pool the state of the checkpoint. Collective.

    Raises:
        SettingsError: on all ranks, when a part does not fit the model, or cannot be read any more.
    """
    error: SettingsError | None = None
    try:
        restore(rank, source.state, source.archive.read)
    except (DamagedError, OSError) as mistake:
        where = source.archive.volumes.folder / source.archive.name
        rule = "name the model that the run began with, or move the checkpoint away to go on from the one before"
        error = SettingsError(f"run.directory={where.parent.parent}: checkpoint {where.name}: {mistake}; {rule}")
    rank.runtime.control.agree(error)


def received(folder: Path, path: str, settings: Settings) -> None:
    """A file came from another node; with a manifest, older checkpoints are kept no longer here either."""
    if path.endswith(MANIFEST_FILE):
        prune(folder, settings.checkpoint)


def as_decided(settings: Settings, source: Source | None) -> Settings:
    """What was measured at the first start, and would be measured anew: the same ranks go on in the same way."""
    if source is None or not source.is_same_layout or settings.instances.concurrency is not Concurrency.auto:
        return settings
    at_once = Concurrency.streams if torch.cuda.is_available() else Concurrency.threads
    decided = at_once if source.state.plan.is_concurrent else Concurrency.serial
    return replace(settings, instances=replace(settings.instances, concurrency=decided))
