"""Make the runs of experiments, as many at once as there are cores for their ranks, and keep what they came to.

Resumable: a run that has ended is not made again, one that was interrupted goes on.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases import Case

from adloco_dist.config.amounts import Amount
from adloco_dist.run.rows import METRICS_FILE
from helpers.hosts import Host, Wan, linked, run_on

ROOT = Path(__file__).parents[1]
Record = dict[str, Any]
PORT = 29541
"""Of the rendezvous on two hosts, whose addresses are their own."""


class Cores:
    """Cores that ranks share out among themselves."""

    def __init__(self, count: int) -> None:
        self._free, self._count = count, count
        self._changed = threading.Condition()

    def take(self, wanted: int) -> int:
        taken = min(wanted, self._count)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        return taken

    def give_back(self, taken: int) -> None:
        with self._changed:
            self._free += taken
            self._changed.notify_all()


def make(wanted: Sequence[Case], folder: Path, cores: int) -> list[Record]:
    """The records of all runs, in their order.

    Raises:
        RuntimeError: a run failed; it names the log.
    """
    shared = Cores(cores)
    with ThreadPoolExecutor(max_workers=cores) as pool:
        return list(pool.map(lambda case: _made(case, folder, shared), wanted))


def read(wanted: Iterable[Case], folder: Path) -> list[Record]:
    """The records of those runs that have ended."""
    return [record for case in wanted if (record := _record(case, folder / case.name))]


def on_hosts(
    count: int, overrides: Sequence[str], link: str | Wan | None, timeout_seconds: float, a_core_each: bool = False
) -> tuple[list[Record], Record]:
    """Train with a rank on each of some real hosts; the rows of the run's records, and the facts of it.

    Args:
        link: the rate between them, as tc takes it ("10mbit"), or a wide-area network; None: unshaped.
        a_core_each: whether a rank stays on a core of its own; two share one where there are fewer.

    Raises:
        RuntimeError: the run failed; its output.
    """
    with linked(count, link) as made:
        return on_these(made, overrides, timeout_seconds, a_core_each)


def on_these(
    made: Sequence[Host],
    overrides: Sequence[str],
    timeout_seconds: float,
    a_core_each: bool = False,
    beside: Callable[[Path, threading.Event], None] | None = None,
) -> tuple[list[Record], Record]:
    """As `on_hosts`, on hosts that are there already.

    Args:
        beside: what else is done meanwhile, in a thread: it takes the file of the run's records, and what says that the
            run has ended.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as threads:
        commands = []
        for rank, host in enumerate(made):
            place = ("--nnodes", str(len(made)), "--nproc-per-node", "1", "--local-addr", host.address,
                     "--rdzv-endpoint", f"{made[0].address}:{PORT}")  # fmt: skip
            train = [sys.executable, str(ROOT / "launch" / "train.py"), *place, *overrides, "run.directory=run"]
            commands.append((host, [*(on_core(rank) if a_core_each else ()), *train]))
        directory = Path(folder) / made[0].name / "run"
        has_ended = threading.Event()
        done_beside = threads.submit(beside, directory / METRICS_FILE, has_ended) if beside else None
        try:
            ended = run_on(commands, Path(folder), timeout_seconds)
        finally:
            has_ended.set()
        if any(code for code, _ in ended):
            raise RuntimeError("\n".join(output for _, output in ended))
        if done_beside:
            done_beside.result()
        return rows_of(directory), facts_of(directory)


def on_core(rank: int) -> list[str]:
    """What a command begins with that is to run on the core of a rank."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[rank % len(cores)])]


def on_one_host(overrides: Sequence[str]) -> Record:
    """Train with one rank; the facts of the run."""
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "1"]
        subprocess.run([*train, *overrides, "run.directory=run"], cwd=folder, check=True, capture_output=True)
        return facts_of(Path(folder) / "run")


def rows_of(directory: Path) -> list[Record]:
    """The rows of a run's records."""
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def facts_of(directory: Path) -> Record:
    """What run.json says."""
    return json.loads((directory / "run.json").read_text(encoding="utf-8"))


def saved_loss(result: Record) -> float:
    """The validation loss of what a run has saved."""
    return next(one["validation_loss"] for one in result["candidates"] if one["name"] == result["saved"])


def _made(case: Case, folder: Path, cores: Cores) -> Record:
    directory = folder / case.name
    done = _record(case, directory)
    if done:
        return done
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = directory.with_suffix(".log")
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *case.arguments, f"run.directory={directory}",
               "run.unfinished=resume"]  # fmt: skip
    taken = cores.take(case.ranks)
    try:
        with log.open("w") as lines:
            # Threads that spin while they wait would take the cores of other runs.
            environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
            subprocess.run(command, stdout=lines, stderr=lines, env=environment, check=False)
    finally:
        cores.give_back(taken)
    made = _record(case, directory)
    if made is None:
        raise RuntimeError(f"{case.name} has failed; {log} says why")
    print(f"{case.name}: loss {made['loss']:.4f}", flush=True)
    return made


def _record(case: Case, directory: Path) -> Record | None:
    """What a run that has ended came to."""
    try:
        facts = facts_of(directory)
    except OSError:
        return None
    result = facts.get("result")
    if not result or not result.get("candidates"):
        return None
    rows = rows_of(directory)
    rounds = [row for row in rows if row["round"] and row["trainer"] == rows[-1]["trainer"]]
    curve = [(row["elapsed_seconds"], row["validation_loss"]) for row in rounds if "validation_loss" in row]
    return {
        "name": case.name,
        "loss": saved_loss(result),
        "curve": [*curve, (rows[-1]["elapsed_seconds"], saved_loss(result))],
        "budget": Amount.of("budget", facts["settings"]["budget"], ("rounds", "tokens", "seconds")).number,
        "rounds": result["rounds"],
        "updates": sum(row["updates"] for row in rounds),
        "tokens": result["tokens"],
        "bytes_sent": sum(sum(row["bytes_sent"].values()) for row in rows),
        "last_updates_per_round": rounds[-1]["updates"] if len(rounds) < 2 else rounds[-2]["updates"],
        "last_batch": rounds[-1]["total_batch"],
        "merge_seconds": sum(
            max(rank.get("merge", 0.0) for rank in row["rank_seconds"].values()) for row in rows if "merge" in row
        ),
    }
