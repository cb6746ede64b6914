"""Rank 0's records: what it knows when a run begins or resumes, and where it goes."""

import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import torch

import adloco_dist
from adloco_dist.checkpoint.resume import ResumePoint
from adloco_dist.cluster.environment import Environment, Link, remarks
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import AlgorithmSettings, InnerOptimizer, RoundLength
from adloco_dist.config.compose import to_plain
from adloco_dist.messages import encode, strict_json
from adloco_dist.objective import matrices
from adloco_dist.policy.plan import PlanInputs
from adloco_dist.pool.arithmetic import in_words
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.worker import peak_lr
from adloco_dist.run.directory import RunDirectory
from adloco_dist.run.display import Display
from adloco_dist.run.journal import Journal, MetricsFile, PlansFile, RunFile, whole_lines
from adloco_dist.run.manifest import DamagedError
from adloco_dist.run.rows import METRICS_FILE
from adloco_dist.run.tracking import start_trackers
from adloco_dist.terminal import new_console, report_line
from adloco_dist.text import counted, in_short

log = logging.getLogger(__name__)
MIN_WIDTH = 80
"""Minimum width of a line in a file, in characters, whatever COLUMNS says."""


@dataclass(frozen=True)
class Change:
    """Of the nodes of a run, whose processes live on."""

    why: str
    since: float
    """When nobody trained any more, by this process' `time.monotonic()`."""


def print_note(line: str) -> None:
    """Show the user what belongs to no record, before there is a display."""
    report_line(f"note: {line}")
    log.info("%s", line)


def open_journal(
    pool: LocalPool,
    inputs: PlanInputs,
    taken: RunDirectory | None,
    environments: Sequence[Environment],
    links: Sequence[Link],
    resume_point: ResumePoint | None,
    change: Change | None = None,
) -> Journal:
    """Rank 0's files, tracking and display, which shows the lines that are reported; elsewhere no sinks, and the log.

    `taken` is the run directory, on rank 0; `resume_point` where the run resumes, None: it begins; `change` why, None:
    its processes are new.
    """
    if taken is None:
        return Journal(report_line=log.info)
    settings = pool.settings
    facts = _facts(pool, inputs, environments, links)
    earlier, seconds = {}, 0.0
    if resume_point:
        restore_records(taken.path, resume_point)
        earlier, seconds = dict(resume_point.state.journal), resume_point.state.seconds
        start = _start(resume_point, pool.runtime, earlier.get("hosts", []), change)
        facts["resumed"] = [*earlier.get("resumed", []), start]
        facts["started"] = earlier.get("started", facts["started"])
    run_file = RunFile(taken.path, facts, earlier or None)
    metrics_file = MetricsFile(taken.path, earlier.get("metrics_bytes", 0))
    plans_file = PlansFile(taken.path, resume_point.num_plans_kept if resume_point else 0)
    crowding = pool.groups.crowding(inputs.layout.rank_sets)
    report_line(_summary(pool, inputs, facts["parameters"]))
    notes = [f"computes in {facts['arithmetic']}", *_of_matrices(pool), *remarks(environments)]
    notes += _of_rounds(settings.algorithm)
    for line in [*notes, *pool.splits.notes, *([crowding] if crowding else [])]:
        print_note(line)
    totals = earlier.get("totals", {})
    display = Display(new_console(min_width=MIN_WIDTH), settings, seconds, totals.get("bytes_sent", 0))
    trackers = start_trackers(
        settings.tracking,
        strict_json(facts["settings"]),
        taken.path,
        metrics_file.num_bytes,
        earlier.get("tracking_id"),
        display.report_line,
    )
    # Sinks are closed from the last to the first: trackers read the result that the run file takes.
    sinks = [taken, *trackers, run_file, metrics_file, plans_file, display]
    return Journal(sinks, display.report_line, totals.get("rounds", -1) if metrics_file.num_bytes else -1)


def _summary(pool: LocalPool, inputs: PlanInputs, num_parameters: int) -> str:
    """What is trained, by whom, on what and for how long, in a line."""
    layout = inputs.layout
    workers = sum(map(layout.num_workers, layout.trainers))
    trainers = f"{counted(len(layout.trainers), 'trainer')} of {counted(workers, 'worker')}"
    ranks = counted(pool.runtime.world_size, "rank")
    what = f"{type(pool.flat_model.module).__name__} of {in_short(num_parameters)} parameters"
    return f"{what}: {trainers} on {ranks}; {pool.splits.source}; until {pool.settings.budget}"


def _of_matrices(pool: LocalPool) -> list[str]:
    """What to say of a run with Muon: what it updates, and at which rate."""
    layout = pool.flat_model.whole_layout
    trained = dict(zip(layout.names, layout.shapes, strict=True))
    inner, hidden = pool.settings.inner, pool.flat_model.hidden_matrices
    if inner.optimizer is not InnerOptimizer.muon:
        return []
    return [f"{matrices.in_words(hidden, trained)}; a worker's rate is {peak_lr(inner, hidden):g}"]


def _of_rounds(algorithm: AlgorithmSettings) -> list[str]:
    """What to say to someone who has named a length of rounds that the link will change."""
    updates = algorithm.updates_per_round
    if algorithm.round is not RoundLength.link or updates == AlgorithmSettings().updates_per_round:
        return []
    rule = f"for rounds of {updates}, set algorithm.updates_range=[{updates},{updates}]"
    return [f"algorithm.updates_per_round={updates} is the first round's, and algorithm.round=link changes it; {rule}"]


def restore_records(directory: Path, resume_point: ResumePoint) -> None:
    """Restore metrics.jsonl as of the checkpoint, and report what is lost of it; raises an OSError where it cannot be
    written."""
    path, records = directory / METRICS_FILE, None
    try:
        records = resume_point.reader.records()
    except (DamagedError, OSError) as error:
        print_note(f"the records in checkpoint {resume_point.reader.name} cannot be read ({error})")
    if records is not None:
        path.write_bytes(records)
    wanted = resume_point.state.journal.get("metrics_bytes", 0)
    held = whole_lines(path, wanted)
    if held < wanted:
        line = f"{path} has {held} bytes in whole lines of the {wanted} that belong to the checkpoint"
        print_note(f"{line}: older records are lost")


def _start(
    resume_point: ResumePoint, runtime: Runtime, earlier_hosts: Sequence[str], change: Change | None
) -> dict[str, Any]:
    """Describe a start that resumes the run: from where, when, on what, and why."""
    return {
        "checkpoint": resume_point.reader.name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "round": resume_point.state.plan.round + 1,
        "why": change.why if change else "",
        "paused_seconds": round(time.monotonic() - change.since, 3) if change else None,
        "world_size": runtime.world_size,
        "hosts": runtime.hosts,
        "lost_hosts": sorted(set(earlier_hosts) - set(runtime.hosts)),
        "new_hosts": sorted(set(runtime.hosts) - set(earlier_hosts)) if earlier_hosts else [],
    }


def _facts(
    pool: LocalPool, inputs: PlanInputs, environments: Sequence[Environment], links: Sequence[Link]
) -> dict[str, Any]:
    """What run.json says from the start."""
    settings, runtime = pool.settings, pool.runtime
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "adloco_dist": adloco_dist.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "hydra": hydra.__version__,
        },
        "command": shlex.join(
            [Path(sys.argv[0]).name, *sys.argv[1:]]
        ),  # of a rank; the script is a user's own, perhaps
        "settings": to_plain(settings),
        "layout": encode(inputs.layout.in_ranks(settings.pool.ranks_per_worker)),
        "batch_limits": inputs.batch_limits,
        "arithmetic": in_words(settings, pool.slots[0]),
        "parameters": sum(shape.numel() for shape in pool.flat_model.whole_layout.shapes),
        "worker_lr": peak_lr(settings.inner, pool.flat_model.hidden_matrices),
        "instances": {"is_concurrent": inputs.is_concurrent, "resident": pool.offload.resident},
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
        "corpus": pool.splits.facts(),
    }
