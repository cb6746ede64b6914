"""The process of a tracker: it reads the records of a run while they are written, and hands them to the tracker.

A run starts it (tracking.py) and tells it by its standard input when to end.
"""

import argparse
import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from adloco_dist.cluster.priority import step_back
from adloco_dist.run.directory import METRICS_FILE
from adloco_dist.run.reading import RUN_FILE
from adloco_dist.run.rows import Record
from adloco_dist.run.tracking import TENSORBOARD, WANDB
from adloco_dist.terminal import report_error
from adloco_dist.text import first_line

EVERY_SECONDS = 1.0
"""Seconds between two looks at the records."""
GRACE_SECONDS = 5.0
"""The run ends a process that takes too long; where the run is gone, the process ends itself so much later."""
AXES = ("round", "updates", "pool_tokens", "bytes", "elapsed_seconds")
"""What curves can be drawn against: totals of the run at the end of a round. `updates` are those of one worker."""
SHARED = {"round", "trainer", "pool_tokens", "elapsed_seconds"}
"""Numbers that are the same in the records of all trainers, or their names."""


class Tracker(Protocol):
    """Something that draws the curves of a run. It may fail and hang."""

    def write(self, round_number: int, values: Mapping[str, float]) -> None:
        """Take all numbers of a round: `AXES`, and each trainer's under trainer<id>/..."""

    def close(self, result: Record | None) -> None:
        """End with the run's result, or with None if it has none."""


class Rounds:
    """The rounds in metrics.jsonl, read once, as far as they have been written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._values: dict[str, float] = {}
        self._round, self._updates, self._bytes = -1, 0, 0

    def skip(self, num_bytes: int) -> int:
        """Pass over the rounds in the first `num_bytes`, which only count in the totals; return the next round."""
        with self._path.open("rb") as file:
            while self._offset < num_bytes:
                line = file.readline()
                self._take(json.loads(line), len(line))
        self._values = {}
        return self._round + 1

    def read(self, is_over: bool) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield number and values of each round since the last call.

        The newest round is complete when the next one has begun, or when nothing was added since the last call.

        Args:
            is_over: nothing will be added.
        """
        has_new = False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):  # half a line is read again when it is whole
                record = json.loads(line)
                if self._values and record["round"] != self._round:
                    yield self._complete()
                self._take(record, len(line))
                has_new = True
        if self._values and (is_over or not has_new):
            yield self._complete()

    def _take(self, record: Record, num_bytes: int) -> None:
        self._offset += num_bytes
        if record["round"] != self._round:
            self._round = record["round"]
            self._updates += record.get("updates", 0)
        self._bytes += sum(record["bytes_sent"].values())
        totals = (self._round, self._updates, record.get("pool_tokens", 0), self._bytes, record["elapsed_seconds"])
        self._values |= dict(zip(AXES, totals, strict=True))
        own = {key: value for key, value in record.items() if key not in SHARED}
        self._values |= flat(f"trainer{record['trainer']}", own)

    def _complete(self) -> tuple[int, dict[str, float]]:
        values, self._values = self._values, {}
        return self._round, values


def flat(prefix: str, record: Record) -> dict[str, float]:
    """The numbers of a nested record, by path."""
    values: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            values |= flat(f"{prefix}/{key}", value)
        elif isinstance(value, int | float):
            values[f"{prefix}/{key}"] = value
    return values


def follow(
    directory: Path, skip_bytes: int, patience_seconds: float, open_tracker: Callable[[Record, int], Tracker]
) -> None:
    """Hand a run's records to a tracker until the run ends, however it ends; then end this process.

    Args:
        skip_bytes: bytes of metrics.jsonl that the tracker has had from an earlier start of the run.
        patience_seconds: how long the tracker may take after the end.
        open_tracker: is given the contents of run.json and the first round that will be written.
    """
    step_back()
    has_ended = threading.Event()
    threading.Thread(target=_await_end, args=(has_ended, patience_seconds + GRACE_SECONDS), daemon=True).start()
    try:
        rounds = Rounds(directory / METRICS_FILE)
        tracker = open_tracker(_facts(directory), rounds.skip(skip_bytes))
        is_over = False
        while not is_over:
            is_over = has_ended.wait(EVERY_SECONDS)
            for number, values in rounds.read(is_over):
                tracker.write(number, values)
        tracker.close(_facts(directory)["result"])
    except BaseException as error:  # libraries also raise SystemExit
        traceback.print_exception(error)
        report_error(f"{type(error).__name__}: {first_line(error)}")
        os._exit(1)  # with this as the last line


def _await_end(has_ended: threading.Event, seconds: float) -> None:
    """Wait until the run ends (it writes a byte) or is gone; from then on this process lives for `seconds` at most."""
    sys.stdin.buffer.read(1)
    faulthandler.dump_traceback_later(seconds, exit=True)
    has_ended.set()


def _facts(directory: Path) -> Record:
    return json.loads((directory / RUN_FILE).read_bytes())


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tracker", choices=(WANDB, TENSORBOARD))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--skip-bytes", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--id", help="of the run in Weights & Biases")
    options = parser.parse_args()

    def open_tracker(facts: Record, next_round: int) -> Tracker:
        if options.tracker == WANDB:
            from adloco_dist.run.weights_and_biases import WandbTracker

            return WandbTracker(options.directory, facts, options.id)
        from adloco_dist.run.tensorboard import TensorBoardTracker

        return TensorBoardTracker(options.directory, next_round)

    follow(options.directory, options.skip_bytes, options.patience, open_tracker)


if __name__ == "__main__":
    main()
