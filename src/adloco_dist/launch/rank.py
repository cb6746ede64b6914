"""One rank of a run: agree with the others on settings, corpus and layout, train, write what lasts."""

import logging
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

from adloco_dist.cluster.failures import LostContactError, PeerFailedError, RankFailedError, failed
from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import STOP_SIGNALS, StopRequest, stop_on_signals
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, Settings, SettingsError, Unfinished
from adloco_dist.config.without_effect import without_effect
from adloco_dist.launch.launchers import has_agent, max_restarts, speaks_for_node
from adloco_dist.launch.rendezvous import check_restarts
from adloco_dist.launch.run import Run, report_line
from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.run.directory import is_finished
from adloco_dist.setup.agreement import compare_settings, survey_cluster
from adloco_dist.setup.dry_run import print_dry_run
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
    stop = StopRequest()
    with ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop, [number for number in STOP_SIGNALS if number != signal.SIGTERM]))
        runtime = stack.enter_context(started(settings.cluster, place, store, stop, settings.pool.ranks_per_worker))
        # Not before: an agent whose other ranks have failed ends with SIGTERM those that wait for them to start.
        stack.enter_context(stop_on_signals(stop, [signal.SIGTERM]))
        runtime.control.agree(error)
        compare_settings(runtime.control, settings)
        check_restarts(settings.run, max_restarts())
        notes = [f"{line}: {why}" for line, why in without_effect(settings, overrides).items()]
        is_interrupted, directory = False, settings.run.directory
        # As who starts it again and again may not know.
        ended = settings.run.unfinished is Unfinished.resume and directory is not None and is_finished(Path(directory))
        if dry_run:
            runtime.heartbeat.enter("measuring links")
            _, links = survey_cluster(runtime, settings)
            if runtime.rank == 0:
                print_dry_run(settings, runtime.nodes, parts, links, notes)
        elif any(reply["ended"] for reply in runtime.control.exchange({"ended": ended})):
            report_line(runtime)(f"run.directory={directory} holds a run that has ended: there is nothing to resume")
        else:
            run = Run(settings, runtime, parts, stack, notes)
            outcome = run.train(stop)
            run.close(outcome, place)
            is_interrupted = outcome.stop == INTERRUPTED
        # Before any rank ends: torchrun ends the others as soon as one exits with another code than 0, and with rank 0
        # goes the store, without which a heartbeat would take its own rank for failed.
        runtime.control.exchange({})
        runtime.heartbeat.close()
        runtime.control.exchange({})
        if is_interrupted and max_restarts() > 0:
            stop.wait_for_signal(AGENT_SECONDS)
    if is_interrupted:
        sys.exit(EXIT_STOPPED)
