"""One rank of a run: agree with the others on settings, corpus and layout, train or go on, write what lasts."""

import logging
import math
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import transformers
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import PreTrainedModel

from adloco_dist.checkpointing import Checkpoints
from adloco_dist.cluster.failures import PeerFailedError, RankFailedError, failed
from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import STOP_SIGNALS, StopRequest, stop_on_signals
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.decisions.evaluation import in_words
from adloco_dist.decisions.plan import INTERRUPTED, SPOILT, Premises
from adloco_dist.hosting import Rank, find_premises, host
from adloco_dist.launch.opening import open_journal, print_note
from adloco_dist.launch.prepare import agree_on_directory, compare_settings, prepare, survey_cluster
from adloco_dist.launch.resume import (
    Source,
    as_decided,
    check_restarts_of_rank,
    check_store_of_restarts,
    fresh_volumes,
    go_on,
    has_ended,
    is_elastic,
    resumed,
)
from adloco_dist.models import build_model
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.flat_model import computes_in_bf16
from adloco_dist.run.directory import STOP_FILE
from adloco_dist.run.journal import Journal
from adloco_dist.run.log import open_log
from adloco_dist.run.model import save_model
from adloco_dist.run.writer import CheckpointWriter
from adloco_dist.terminal import show, tell_error, told_wait
from adloco_dist.tools.planner import print_dry_run
from adloco_dist.train import Outcome, train

log = logging.getLogger(__name__)
AGENT_SECONDS = 10.0
"""Agents that make room for another node end their ranks, one a little later than the other: a rank that ended by
itself before that would look as if it had failed."""
RECORDS_BYTES = 1 << 20
"""Room that a run directory must have beside the model."""


class SpoiltError(RuntimeError):
    """Training comes to nothing: workers were not finite in too many rounds, or no trainer's loss is in the end."""


def run_rank(overrides: Sequence[str], dry_run: bool) -> None:
    """What every process that torchrun starts does.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake; nothing was written then.
    """
    check_store_of_restarts()
    told_as_rank(lambda place, store: _run(place, store, overrides, dry_run))


def told_as_rank(work: Callable[[Place, Store], None]) -> None:
    """Do a rank's work; a failure goes into torchrun's error file, told once for all ranks, and ends the process."""
    place = Place.from_torchrun()

    def body() -> None:
        try:
            store = join_store(place)
        except SettingsError as error:  # of this node alone: the others do not hear of it
            if place.local_rank == 0:
                tell_error(f"error: {error}")
            os._exit(EXIT_USER_ERROR)
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


def _run(place: Place, store: Store, overrides: Sequence[str], dry_run: bool) -> None:
    transformers.utils.logging.disable_progress_bar()  # rank 0 shows the run's own
    transformers.utils.logging.set_verbosity_error()  # layers that are new, heads that are not needed
    settings, error = _compose(overrides)
    with ExitStack() as stack:
        stop = StopRequest()
        stack.enter_context(stop_on_signals(stop, [number for number in STOP_SIGNALS if number != signal.SIGTERM]))
        runtime = stack.enter_context(started(settings.cluster, place, store, stop))
        # Not before: an agent whose other ranks have failed ends with it those that wait for them to start.
        stack.enter_context(stop_on_signals(stop, [signal.SIGTERM]))
        control = runtime.control
        control.agree(error)
        compare_settings(control, settings)
        check_restarts_of_rank(settings)
        if dry_run:
            if runtime.rank == 0:
                print_dry_run(settings, runtime.nodes)
            return
        tell = print_note if runtime.rank == 0 else log.info
        if has_ended(control, settings):
            tell(f"run.directory={settings.run.directory} holds a run that has ended: there is nothing to go on with")
            return
        with told_wait(runtime.heartbeat.in_words, speaks=runtime.rank == 0):
            runtime.heartbeat.enter("looking at nodes and links")
            environments, links = survey_cluster(runtime, settings)
            runtime.heartbeat.enter("looking for a checkpoint")
            source = stack.enter_context(resumed(runtime, settings, tell))
            rank, premises = _host(runtime, settings, source)
        needed_bytes = 4 * rank.flat_model.num_parameters + RECORDS_BYTES
        directory, taken = agree_on_directory(control, settings, needed_bytes, goes_on=source is not None)
        volumes = source.archive.volumes if source else stack.enter_context(fresh_volumes(runtime, directory, settings))
        terminal = open_log(directory, runtime.rank)
        log.info("%s", environments[runtime.rank])
        (directory / STOP_FILE).unlink(missing_ok=True)  # what stopped the run before it goes on now
        stop.file = Path(settings.run.stop_file) if settings.run.stop_file else directory / STOP_FILE
        journal, tell = open_journal(rank, premises, taken, environments, links, source)
        writer = CheckpointWriter(volumes, runtime.store, runtime.world_size, settings.checkpoint, tell)
        try:
            checkpoints = Checkpoints(writer, journal, directory, settings)
            outcome = train(rank, premises, journal, stop, checkpoints, source and source.state)
            writer.wait()
            if outcome.stop == SPOILT:
                raise SpoiltError(outcome.plan.spoilt_in_words())
            if outcome.result is not None and outcome.result["saved"] is None:
                raise SpoiltError("the validation loss of no trainer is finite, so no model is saved; lower inner.lr")
        except Exception:
            journal.close()
            raise
        told = _end(outcome, journal, directory, writer.newest)
        log.info("%s", "; ".join(told))
        if runtime.rank == 0:
            show("\n".join(told))
        elif place.local_rank == 0:  # every node's terminal tells how it went; files are on rank 0's node
            show(f"{told[0]}; run directory on {runtime.hosts[0]}: {directory}", terminal)
        # Before any rank ends: torchrun ends the others as soon as one exits with another code than 0.
        control.exchange({})
        if outcome.stop == INTERRUPTED and is_elastic():
            stop.wait_for_signal(AGENT_SECONDS)
    if outcome.stop == INTERRUPTED:
        sys.exit(EXIT_STOPPED)


def _host(runtime: Runtime, settings: Settings, source: Source | None) -> tuple[Rank, Premises]:
    """This rank's share of the pool, as it begins or as the checkpoint has it."""
    state = source.state if source else None
    runtime.heartbeat.enter("reading the corpus")
    layout, splits, config, trajectory = prepare(settings, runtime, state)
    runtime.heartbeat.enter("setting up the pool")
    module: PreTrainedModel | None = None
    error: SettingsError | None = None
    try:
        set_up_arithmetic(settings, runtime.device)
        in_bf16 = computes_in_bf16(settings.precision, runtime.device)
        is_labelled = settings.data.is_labelled
        module = build_model(settings.model, config, settings.seed, is_labelled, runtime.device, in_bf16)
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
    assert module is not None
    rank = host(as_decided(settings, source), runtime, splits, module, layout, state.shards if state else None)
    rank.settings = settings
    premises = find_premises(rank, layout, trajectory)
    if source:
        go_on(rank, source)
    return rank, premises


def _end(outcome: Outcome, journal: Journal, directory: Path, checkpoint: str | None) -> list[str]:
    """Write what a run that has come to an end leaves; the lines that there are to tell of it."""
    rank, result, where = outcome.rank, outcome.result, f"run directory: {directory}"
    if result is None:
        journal.close({"stop": outcome.stop, "saved": None, "candidates": []})
        told = [f"stopped: {outcome.stop} in round {outcome.plan.round + 1}", where]
        goes_on = "the same command with run.directory and run.unfinished=resume goes on"
        kept = f"checkpoint: {checkpoint}; {goes_on}" if checkpoint else "no checkpoint, for nothing new was trained"
        return [*told, kept]
    best = min(result["candidates"], key=lambda candidate: (math.isnan(loss := candidate["validation_loss"]), loss))
    told = [f"ended: {outcome.stop}; best {in_words(best)}", where]
    if outcome.weights is not None:
        told.append(f"model: {save_model(directory, rank.flat_model, outcome.weights, rank.splits.vocabulary)}")
    journal.close({"stop": outcome.stop, **result})
    return told


def _compose(overrides: Sequence[str]) -> tuple[Settings, SettingsError | None]:
    """The settings, or the defaults with the error: even a rank with wrong settings must reach the others to say so."""
    try:
        return compose(overrides), None
    except SettingsError as error:
        return Settings(), error
