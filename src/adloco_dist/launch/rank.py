"""One rank of a run: agree with the others on settings, corpus and layout, train, write what lasts."""

import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
import torch
import transformers
from rich.console import Console
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.multiprocessing.errors import record

import adloco_dist
from adloco_dist.cluster.failures import PeerFailedError, RankFailedError, end_with_agent, failed
from adloco_dist.cluster.runtime import Place, join_store, started
from adloco_dist.cluster.signals import StopRequest, stop_on_signals
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_ERROR, Settings, SettingsError, TrackingMode
from adloco_dist.config.compose import compose, to_plain
from adloco_dist.decisions.environment import Environment, Link, remarks
from adloco_dist.decisions.plan import INTERRUPTED, Premises
from adloco_dist.hosting import Rank, find_premises, host
from adloco_dist.launch.prepare import agree_on_directory, compare_settings, prepare, survey_cluster
from adloco_dist.models import build_model
from adloco_dist.run.directory import STOP_FILE, RunDirectory
from adloco_dist.run.display import Display
from adloco_dist.run.journal import Journal, MetricsFile, RunFile, Sink
from adloco_dist.run.log import open_log
from adloco_dist.run.model import save_model
from adloco_dist.run.tracking import WandbSink
from adloco_dist.tools.planner import print_dry_run
from adloco_dist.train import Outcome, train

log = logging.getLogger(__name__)
RECORDS_BYTES = 1 << 20
"""Room that a run directory must have beside the model."""


def run_rank(overrides: Sequence[str], dry_run: bool) -> None:
    """What every process that torchrun starts does.

    Raises:
        SettingsError: on all ranks, when one of them finds a mistake; nothing was written then.
    """
    told_as_rank(lambda place, store: _run(place, store, overrides, dry_run))


def told_as_rank(work: Callable[[Place, Store], None]) -> None:
    """Do a rank's work; a failure goes into torchrun's error file, told once for all ranks, and ends the process."""
    end_with_agent()
    place = Place.from_torchrun()

    def body() -> None:
        try:
            store = join_store(place)
        except SettingsError as error:  # of this node alone: the others do not hear of it
            if place.local_rank == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
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
    settings, error = _compose(overrides)
    with stop_on_signals() as stop, started(settings.cluster, place, store) as runtime:
        control = runtime.control
        control.agree(error)
        compare_settings(control, settings)
        if dry_run:
            if runtime.rank == 0:
                print_dry_run(settings, runtime.nodes)
            return
        environments, links = survey_cluster(runtime, settings)
        layout, splits, config, trajectory = prepare(settings, runtime)
        rank = host(settings, runtime, splits, build_model(settings.model, config, settings.seed), layout)
        premises = find_premises(rank, layout, trajectory)
        needed_bytes = 4 * rank.flat_model.num_elements + RECORDS_BYTES
        directory, taken = agree_on_directory(control, settings, needed_bytes)
        terminal = open_log(directory, runtime.rank)
        log.info("%s", environments[runtime.rank])
        stop.file = Path(settings.run.stop_file) if settings.run.stop_file else directory / STOP_FILE
        journal = open_journal(rank, premises, taken, environments, links)
        outcome = _train(rank, premises, journal, stop)
        if outcome.weights is not None and runtime.rank == 0:
            path = save_model(directory, outcome.flat_model, outcome.weights, splits)
            journal.close({"stop": outcome.stop, **outcome.result})
            print(f"ended: {outcome.stop}\nrun directory: {directory}\nmodel: {path}")
        elif place.local_rank == 0:
            # Every node's terminal tells how it went; files are on rank 0's node.
            best = min(candidate["validation_perplexity"] for candidate in outcome.result["candidates"])
            where = f"run directory on {runtime.hosts[0]}: {directory}"
            print(f"ended: {outcome.stop}; best perplexity {best:.3f}; {where}", file=terminal, flush=True)
        # Before any rank ends: torchrun ends the others as soon as one exits with another code than 0.
        control.exchange({})
    if outcome.stop == INTERRUPTED:
        sys.exit(EXIT_STOPPED)


def _train(rank: Rank, premises: Premises, journal: Journal, stop: StopRequest) -> Outcome:
    try:
        return train(rank, premises, journal, stop)
    except Exception:
        journal.close()
        raise


def open_journal(
    rank: Rank,
    premises: Premises,
    taken: RunDirectory | None,
    environments: Sequence[Environment],
    links: Sequence[Link],
) -> Journal:
    """Rank 0's files, tracking and display; a journal without sinks elsewhere.

    Args:
        taken: the run directory, on rank 0.
    """
    if taken is None:
        return Journal()
    settings = rank.settings
    plain = to_plain(settings)
    facts = _facts(rank, premises, plain, environments, links)
    sinks: list[Sink] = [taken, RunFile(taken.path, facts), MetricsFile(taken.path)]
    if settings.tracking.mode is not TrackingMode.disabled:
        sinks.append(WandbSink(settings.tracking, taken.path, plain))
    for line in remarks(environments):
        print(f"note: {line}")
    sinks.append(Display(Console(), settings.budget))
    return Journal(sinks)


def _facts(
    rank: Rank, premises: Premises, plain: dict[str, Any], environments: Sequence[Environment], links: Sequence[Link]
) -> dict[str, Any]:
    runtime, splits = rank.runtime, rank.splits
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "adloco_dist": adloco_dist.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hydra": hydra.__version__,
        },
        "settings": plain,
        "layout": asdict(premises.layout),
        "batch_limits": premises.batch_limits,
        "instances": {"at_once": premises.is_concurrent, "resident": rank.residence.resident},
        "cluster": {
            "world_size": runtime.world_size,
            "nodes": runtime.nodes,
            "hosts": runtime.hosts,
            "device": str(runtime.device),
            "backend": runtime.backend.name,
            "threads_per_rank": runtime.threads,
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "ranks": [asdict(environment) for environment in environments],
            "links": [asdict(link) for link in links],
        },
        "corpus": {
            "source": splits.source,
            "digest": splits.digest,
            "train_tokens": len(splits.train.tokens),
            "validation_tokens": len(splits.validation.tokens),
            "vocab_size": splits.vocab_size,
        },
    }


def _compose(overrides: Sequence[str]) -> tuple[Settings, SettingsError | None]:
    """The settings, or the defaults with the error: even a rank with wrong settings must reach the others to say so."""
    try:
        return compose(overrides), None
    except SettingsError as error:
        return Settings(), error
