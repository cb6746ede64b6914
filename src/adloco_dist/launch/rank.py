"""One rank of a run: agree with the others on settings, corpus and layout, train, write what lasts."""

import logging
import os
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

from adloco_dist.checkpoint.resume import ResumePoint, fresh_domains, restore_pool, resumed
from adloco_dist.checkpoint.saving import Checkpoints
from adloco_dist.checkpoint.writer import CheckpointWriter
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.failures import PeerFailedError, RankFailedError, failed
from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import STOP_SIGNALS, StopRequest, stop_on_signals
from adloco_dist.cluster.survey import Link
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, RunSettings, Settings, SettingsError
from adloco_dist.config.without_effect import without_effect
from adloco_dist.launch.launchers import has_agent, speaks_for_node
from adloco_dist.launch.restarts import check_restarts_of_rank, check_store_of_restarts, has_ended, is_elastic
from adloco_dist.policy.evaluation import in_words
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, PlanInputs
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.report.processes import listen, shown_live, write_report
from adloco_dist.round.local_pool import LocalPool
from adloco_dist.run.directory import PROFILE_DIRECTORY, STOP_FILE
from adloco_dist.run.journal import Journal
from adloco_dist.run.log import open_log
from adloco_dist.run.model import save_model
from adloco_dist.run.profiler import RoundProfiler
from adloco_dist.setup.agreement import (
    agree_on_directory,
    compare_settings,
    prepare,
    survey_cluster,
    with_known_budget,
)
from adloco_dist.setup.building import build_module
from adloco_dist.setup.journal import open_journal, print_note
from adloco_dist.setup.parts import Parts
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.terminal import report_error, reported_wait, show
from adloco_dist.text import first_line
from adloco_dist.tools.planner import print_dry_run
from adloco_dist.train import Outcome, train

log = logging.getLogger(__name__)
AGENT_SECONDS = 10.0
"""Agents that make room for another node end their ranks, one a little later than the other: a rank that ended by
itself before that would look as if it had failed."""
RECORDS_BYTES = 1 << 20
"""Room that a run directory must have beside the model."""


class NonfiniteError(RuntimeError):
    """Training comes to nothing: workers were not finite in too many rounds, or no trainer's loss is in the end."""


def run_rank(overrides: Sequence[str], dry_run: bool, parts: Parts) -> None:
    """What every process that torchrun starts does.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake; nothing was written then.
    """
    check_store_of_restarts()
    reported_as_rank(lambda place, store: _run(place, store, overrides, dry_run, parts))


def reported_as_rank(work: Callable[[Place, Store], None]) -> None:
    """Do a rank's work; a failure ends the process, and is in torchrun's error file, once for all ranks."""
    place = Place.from_torchrun()

    def body() -> None:
        try:
            with reported_wait(lambda: f"waiting for the other ranks of {place.world_size}", speaks_for_node()):
                store = join_store(place)
        except SettingsError as error:  # of this node alone: the others do not hear of it
            if speaks_for_node():
                report_error(f"error: {error}")
            os._exit(EXIT_USER_ERROR)
        except dist.DistError as error:
            if has_agent():  # which reports it
                raise
            where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
            rule = f"{place.world_size} ranks did not meet there ({first_line(error)})"
            report_error(f"error: {where}: {rule}; start all with torchrun, or unset TORCHELASTIC_RUN_ID")
            os._exit(EXIT_FAILURE)
        try:
            work(place, store)
        except SettingsError:
            raise
        except Exception as error:
            where = f"rank {place.rank} on {platform.node()}"
            raise failed(error, where, store) from error

    try:
        record(body)()
    except (RankFailedError, PeerFailedError) as failure:
        log.error("%s", failure, exc_info=True)
        if not logging.getLogger().handlers:  # no log file yet
            traceback.print_exception(failure)
        sys.stdout.flush()
        os._exit(EXIT_FAILURE)  # a destructor may wait for ranks that are gone


def _run(place: Place, store: Store, overrides: Sequence[str], dry_run: bool, parts: Parts) -> None:
    settings, error = _compose(overrides, parts)
    with ExitStack() as stack:
        stop, size = StopRequest(), settings.pool.ranks_per_worker
        stack.enter_context(stop_on_signals(stop, [number for number in STOP_SIGNALS if number != signal.SIGTERM]))
        runtime = stack.enter_context(started(settings.cluster, place, store, stop, size))
        # Not before: an agent whose other ranks have failed ends with it those that wait for them to start.
        stack.enter_context(stop_on_signals(stop, [signal.SIGTERM]))
        control = runtime.control
        control.agree(error)
        compare_settings(control, settings)
        check_restarts_of_rank(settings)
        unread = [f"{line}: {why}" for line, why in without_effect(settings, overrides).items()]
        if dry_run:
            runtime.heartbeat.enter("measuring links")
            _, links = survey_cluster(runtime, settings)
            if runtime.rank == 0:
                print_dry_run(settings, runtime.nodes, parts, links, unread)
            return
        report_line = print_note if runtime.rank == 0 else log.info
        if has_ended(control, settings):
            report_line(
                f"run.directory={settings.run.directory} holds a run that has ended: there is nothing to resume"
            )
            return
        with reported_wait(runtime.heartbeat.in_words, speaks=runtime.rank == 0):
            runtime.heartbeat.enter("looking at nodes and links")
            environments, links = survey_cluster(runtime, settings)
            runtime.heartbeat.enter("looking for a checkpoint")
            resume_point = stack.enter_context(resumed(runtime, settings, report_line))
            pool, inputs = _set_up_pool(runtime, settings, parts, resume_point, links)
        needed_bytes = 4 * pool.flat_model.num_parameters + RECORDS_BYTES
        listener = _agree_on_listener(control, settings.run)
        directory, taken = agree_on_directory(control, settings, needed_bytes, is_resumed=resume_point is not None)
        domains = (
            resume_point.reader.domains
            if resume_point
            else stack.enter_context(fresh_domains(runtime, directory, settings))
        )
        terminal = open_log(directory, runtime.rank)
        log.info("%s", environments[runtime.rank])
        for line in unread if runtime.rank == 0 else ():
            print_note(line)
        (directory / STOP_FILE).unlink(missing_ok=True)  # what stopped the run before it resumes now
        stop.file = Path(settings.run.stop_file) if settings.run.stop_file else directory / STOP_FILE
        journal, report_line = open_journal(pool, inputs, taken, environments, links, resume_point)
        if address := stack.enter_context(shown_live(directory, listener)):
            report_line(f"the run is shown on {address}")
        writer = CheckpointWriter(domains, runtime.store, runtime.world_size, settings.checkpoint, report_line)
        try:
            checkpoints = Checkpoints(writer, journal, directory, settings)
            profiler = RoundProfiler(settings.profile.chosen, directory / PROFILE_DIRECTORY, runtime, report_line)
            outcome = train(pool, inputs, journal, stop, checkpoints, resume_point and resume_point.state, profiler)
            writer.wait()
            if outcome.stop == NONFINITE:
                raise NonfiniteError(outcome.plan.nonfinite_in_words())
            if outcome.result is not None and outcome.result["saved"] is None:
                raise NonfiniteError(
                    "the validation loss of no trainer is finite, so no model is saved; lower inner.lr"
                )
        except Exception as error:
            journal.close()
            if isinstance(error, NonfiniteError):
                _report(runtime, settings, directory)
            raise
        lines = _end(outcome, journal, directory, writer.newest)
        log.info("%s", "; ".join(lines))
        if runtime.rank == 0:
            show("\n".join(lines))
        elif place.local_rank == 0:  # every node's terminal shows how it went; files are on rank 0's node
            show(f"{lines[0]}; run directory on {runtime.hosts[0]}: {directory}", terminal)
        resumes_at_once = outcome.stop == INTERRUPTED and is_elastic()
        if not resumes_at_once:
            _report(runtime, settings, directory)
        # Before any rank ends: torchrun ends the others as soon as one exits with another code than 0.
        control.exchange({})
        if resumes_at_once:
            stop.wait_for_signal(AGENT_SECONDS)
    if outcome.stop == INTERRUPTED:
        sys.exit(EXIT_STOPPED)


def _agree_on_listener(control: ControlPlane, run: RunSettings) -> socket.socket | None:
    """Rank 0 listens where the run is to be shown live, before anything is written.

    Raises:
        SettingsError: on all ranks, when it cannot.
    """
    listener: socket.socket | None = None
    error: SettingsError | None = None
    if control.rank == 0 and run.watch is not None:
        try:
            listener = listen("run.watch", run.watch, run.watch_address)
        except SettingsError as mistake:
            error = mistake
    control.agree(error)
    return listener


def _set_up_pool(
    runtime: Runtime, settings: Settings, parts: Parts, resume_point: ResumePoint | None, links: Sequence[Link]
) -> tuple[LocalPool, PlanInputs]:
    """This rank's share of the pool, as it begins or as the checkpoint has it."""
    state = resume_point.state if resume_point else None
    runtime.heartbeat.enter("reading the corpus")
    layout, splits, objective, trajectory = prepare(settings, runtime, parts, state)
    if settings.budget.epochs is not None:
        epochs, settings = settings.budget.epochs, with_known_budget(settings, splits)
        if runtime.rank == 0:
            print_note(f"budget.epochs={epochs:g} of {splits.source}: {settings.budget.tokens:,} tokens")
    runtime.heartbeat.enter("setting up the pool")
    error: SettingsError | None = None
    try:
        set_up_arithmetic(settings, runtime.device)
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
    module = build_module(objective, settings, runtime)
    pool = set_up_pool(
        settings, runtime, splits, objective, module, layout, state.shards if state else None,
        resume_point.was_concurrent if resume_point else None,
    )  # fmt: skip
    inputs = find_plan_inputs(pool, layout, trajectory, links)
    if resume_point:
        restore_pool(pool, resume_point)
    return pool, inputs


def _end(outcome: Outcome, journal: Journal, directory: Path, checkpoint: str | None) -> list[str]:
    """Write what a run that has come to an end leaves; the lines that there are to report of it."""
    pool, result, where = outcome.pool, outcome.result, f"run directory: {directory}"
    if result is None:
        journal.close({"stop": outcome.stop, "saved": None, "candidates": []})
        detail = [f"stopped: {outcome.stop} in round {outcome.plan.round + 1}", where]
        resumes = "the same command with run.directory and run.unfinished=resume resumes it"
        kept = f"checkpoint: {checkpoint}; {resumes}" if checkpoint else "no checkpoint, for nothing new was trained"
        return [*detail, kept]
    saved = [candidate for candidate in result["candidates"] if candidate["name"] == result["saved"]]
    figure = in_words((saved or result["candidates"])[0])
    detail = [f"ended: {outcome.stop}; {figure}", where]
    if outcome.weights is not None:
        detail.append(f"model: {save_model(directory, pool.flat_model, outcome.weights, pool.objective)}")
    journal.close({"stop": outcome.stop, **result})
    return detail


def _report(runtime: Runtime, settings: Settings, directory: Path) -> None:
    """Rank 0 writes the page of the run that has ended, and says where it is."""
    if runtime.rank == 0 and settings.run.report:
        runtime.heartbeat.enter("writing the report")
        line = write_report(directory)
        log.info("%s", line)
        show(line)


def _compose(overrides: Sequence[str], parts: Parts) -> tuple[Settings, SettingsError | None]:
    """The settings, or the defaults with the error: even a rank with wrong settings must reach the others to say so."""
    try:
        return parts.compose(overrides), None
    except SettingsError as error:
        return Settings(), error
