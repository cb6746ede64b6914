"""Rank 0's records: what it knows when a run begins or goes on, and where it goes."""

import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
import torch
import transformers

import adloco_dist
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import TrackingMode
from adloco_dist.config.compose import to_plain
from adloco_dist.decisions.environment import Environment, Link, remarks
from adloco_dist.decisions.plan import Premises
from adloco_dist.hosting import Rank
from adloco_dist.launch.resume import Source
from adloco_dist.pool.arithmetic import in_words
from adloco_dist.run.directory import METRICS_FILE, RunDirectory
from adloco_dist.run.display import Display
from adloco_dist.run.journal import Journal, MetricsFile, RunFile, Sink, whole_lines
from adloco_dist.run.parts import DamagedError
from adloco_dist.terminal import new_console, tell

log = logging.getLogger(__name__)
LEAST_WIDTH = 80
"""Of a line in a file, whatever COLUMNS says."""


def print_note(line: str) -> None:
    """Tell the user what belongs to no record, before there is a display."""
    tell(f"note: {line}")
    log.info("%s", line)


def open_journal(
    rank: Rank,
    premises: Premises,
    taken: RunDirectory | None,
    environments: Sequence[Environment],
    links: Sequence[Link],
    source: Source | None,
) -> tuple[Journal, Callable[[str], None]]:
    """Rank 0's files, tracking and display, and what shows a line there; a journal without sinks elsewhere.

    Args:
        taken: the run directory, on rank 0.
        source: where the run goes on; None: it begins.
    """
    if taken is None:
        return Journal(), log.info
    settings, runtime = rank.settings, rank.runtime
    plain = to_plain(settings)
    facts = _facts(rank, premises, plain, environments, links)
    earlier = dict(source.state.journal) if source else {}
    keep_bytes = earlier.get("metrics_bytes", 0)
    if source:
        restore_records(taken.path, source)
        facts["resumed"] = [*earlier.get("resumed", []), _start(source, runtime)]
        facts["started"] = earlier.get("started", facts["started"])
    sinks: list[Sink] = [taken, RunFile(taken.path, facts, earlier or None), MetricsFile(taken.path, keep_bytes)]
    if settings.tracking.mode is not TrackingMode.disabled:
        from adloco_dist.run.tracking import WandbSink  # half a second, and files in the temporary folder

        sinks.append(WandbSink(settings.tracking, taken.path, plain, earlier.get("tracking_id")))
    crowding = rank.groups.crowding(premises.layout.rank_sets)
    notes = [f"computes in {facts['arithmetic']}", *remarks(environments), *rank.splits.notes]
    for line in [*notes, *([crowding] if crowding else [])]:
        print_note(line)
    display = Display(new_console(least_width=LEAST_WIDTH), settings.budget, source.state.seconds if source else 0.0)
    return Journal([*sinks, display], display.tell), display.tell


def restore_records(directory: Path, source: Source) -> None:
    """metrics.jsonl as of the checkpoint, for a node that has not got it; what is lost of it is told.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / METRICS_FILE
    try:
        records = source.archive.records()
    except (DamagedError, OSError) as error:
        print_note(f"the records in checkpoint {source.archive.name} cannot be read ({error})")
        records = None
    if records is not None:
        path.write_bytes(records)
    wanted = source.state.journal.get("metrics_bytes", 0)
    held = whole_lines(path, wanted)
    if held < wanted:
        told = f"{path} has {held} bytes in whole lines of the {wanted} that belong to the checkpoint"
        print_note(f"{told}: older records are lost")


def _start(source: Source, runtime: Runtime) -> dict[str, Any]:
    """Of every start but the first: from where, when, and on what."""
    return {
        "checkpoint": source.archive.name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": runtime.world_size,
        "hosts": runtime.hosts,
    }


def _facts(
    rank: Rank, premises: Premises, plain: dict[str, Any], environments: Sequence[Environment], links: Sequence[Link]
) -> dict[str, Any]:
    settings, runtime, splits = rank.settings, rank.runtime, rank.splits
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
        "arithmetic": in_words(settings, rank.lanes[0]),
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
            "train_sequences": splits.num_sequences,
            "validation_sequences": splits.validation.num_sequences,
            "validation_tokens": splits.validation.num_tokens,
            "vocab_size": splits.vocabulary.size,
            "labels": splits.labels and splits.labels.names,
        },
    }
