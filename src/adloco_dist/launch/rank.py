"""One rank of a run: agree with the others on settings, corpus and layout, train, write what lasts."""

import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

from adloco_dist.cluster.failures import LostContactError, PeerFailedError, RankFailedError, failed
from adloco_dist.cluster.meeting import Meeting
from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, Settings, SettingsError
from adloco_dist.launch.generations import train_with_who_is_there
from adloco_dist.launch.job import Job, World
from adloco_dist.launch.launchers import has_agent, max_restarts, speaks_for_node
from adloco_dist.setup.parts import Parts
from adloco_dist.terminal import report_error, reported_wait
from adloco_dist.text import first_line

log = logging.getLogger(__name__)
AGENT_SECONDS = 10.0
"""Agents that make room for another node end their ranks, one a little later than the other: a rank that ended by
itself before that would look as if it had failed."""


def run_rank(overrides: Sequence[str], dry_run: bool, parts: Parts) -> None:
    """Train, or show what would be trained, as one of the processes that torchrun starts.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake; nothing was written then.
    """
    if max_restarts() > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rule = "torchrun would keep its store, with what the last start left there"
        remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"
        raise SettingsError.of("--max-restarts", max_restarts(), f"{rule}; {remedy}")
    reported_as_rank(lambda place, store: _run(place, store, overrides, dry_run, parts))


def reported_as_rank(work: Callable[[Place, Store], None]) -> None:
    """Do a rank's work; a failure ends the process, and is in torchrun's error file, once for all ranks."""
    place = Place.from_torchrun()

    @record
    def work_or_fail() -> None:
        store = _join(place)
        try:
            work(place, store)
        except SettingsError:
            raise
        except Exception as error:
            raise failed(error, f"rank {place.rank} on {platform.node()}", store) from error

    try:
        work_or_fail()
    except (RankFailedError, PeerFailedError) as failure:
        log.error("%s", failure, exc_info=True)
        if not logging.getLogger().handlers:  # no log file yet
            traceback.print_exception(failure)
        sys.stdout.flush()
        os._exit(EXIT_FAILURE)  # a destructor may wait for ranks that are gone


def run_together(settings_of: Callable[[], Settings], stage: str, work: Callable[[Runtime, Settings], None]) -> None:
    """Do a rank's work of a command that trains nothing, once all ranks have met; `stage` names it in reports.

    Raises:
        SettingsError: on all ranks, when `settings_of` or the work raises one on any of them.
    """

    def run(place: Place, store: Store) -> None:
        settings, error = _settings_or_error(settings_of)
        with started(settings.cluster, place, store, StopRequest()) as runtime:
            runtime.control.agree(error)
            runtime.heartbeat.enter(stage)
            with reported_wait(runtime.heartbeat.in_words, speaks=runtime.rank == 0):
                work(runtime, settings)

    reported_as_rank(run)


def _settings_or_error(settings_of: Callable[[], Settings]) -> tuple[Settings, SettingsError | None]:
    """The settings, or the defaults and the mistake: even a rank with wrong settings must reach the others."""
    try:
        return settings_of(), None
    except SettingsError as mistake:
        return Settings(), mistake


def _join(place: Place) -> Store:
    """Meet the other ranks at torchrun's store. Where that fails this process ends: the others do not hear of it."""
    try:
        with reported_wait(lambda: f"waiting for the other ranks of {place.world_size}", speaks_for_node()):
            return join_store(place)
    except SettingsError as error:
        if speaks_for_node():
            report_error(f"error: {error}")
        os._exit(EXIT_USER_ERROR)
    except dist.DistError as error:
        if has_agent():  # which reports it
            raise LostContactError(f"rank {place.rank} on {platform.node()}: {first_line(error)}") from error
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
        rule = f"{place.world_size} ranks did not meet there ({first_line(error)})"
        report_error(f"error: {where}: {rule}; start all with torchrun, or unset TORCHELASTIC_RUN_ID")
        os._exit(EXIT_FAILURE)


def _run(place: Place, store: Store, overrides: Sequence[str], dry_run: bool, parts: Parts) -> None:
    settings, error = _settings_or_error(lambda: parts.compose(overrides))
    job = Job(settings, error, overrides, dry_run, parts)
    if meeting := Meeting.from_environment():
        is_interrupted = train_with_who_is_there(job, meeting, place, store)
    else:
        stop = StopRequest()
        is_interrupted = job.work(World(place, store), stop)
        if is_interrupted and max_restarts() > 0:
            stop.wait_for_signal(AGENT_SECONDS)
    if is_interrupted:
        sys.exit(EXIT_STOPPED)
