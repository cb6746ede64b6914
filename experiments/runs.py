"""Make the runs of experiments, as many at once as there are cores for their ranks, and keep what they came to.

Resumable: a run that has ended is not made again, one that was interrupted goes on.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases import Case

ROOT = Path(__file__).parents[1]
Record = dict[str, Any]


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
        facts = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    result = facts.get("result")
    if not result or not result.get("candidates"):
        return None
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rounds = [row for row in rows if row["round"] and row["trainer"] == rows[-1]["trainer"]]
    best = next(one for one in result["candidates"] if one["name"] == result["saved"])
    return {
        "name": case.name,
        "loss": best["validation_loss"],
        "budget": next(limit for limit in facts["settings"]["budget"].values() if limit is not None),
        "rounds": result["rounds"],
        "updates": sum(row["updates"] for row in rounds),
        "tokens": result["tokens"],
        "bytes_sent": sum(sum(row["bytes_sent"].values()) for row in rows),
        "last_updates_per_round": rounds[-1]["updates"] if len(rounds) < 2 else rounds[-2]["updates"],
        "last_batch": rounds[-1]["total_batch"],
    }
