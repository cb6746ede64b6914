"""Trackers of a run: Weights & Biases and TensorBoard, on rank 0.

Each has a thread of its own. Training hands it the rows of a round and never waits for it, so a tracker that fails or
hangs costs one line, and at the end of a run a bounded time.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from adloco_dist.config import TrackingMode, TrackingSettings, require
from adloco_dist.config.compose import flatten
from adloco_dist.messages import Json, encode
from adloco_dist.run.journal import Sink
from adloco_dist.run.reading import RUN_FILE
from adloco_dist.run.rows import METRICS_FILE, TrainerRow, parse_rows
from adloco_dist.terminal import reported_wait
from adloco_dist.text import first_line

log = logging.getLogger(__name__)
WANDB, TENSORBOARD = "wandb", "tensorboard"
"""The folders of a run directory that hold what trackers write."""
PATIENCE_SECONDS, FAILED_SECONDS = 30.0, 5.0
"""How long a tracker may take at the end of a run; of one that failed, whose other ranks are waiting to hear of it."""
MAX_WAITING_ROUNDS = 10_000
"""Rounds that wait for a slow tracker; it misses those that come then."""
AXES = ("round", "updates", "pool_tokens", "bytes", "elapsed_seconds")
"""What curves can be drawn against: totals of the run at the end of a round. `updates` are those of one worker."""
LONGEST_NAME = 128
"""Characters that Weights & Biases takes as the name of a run or group."""
Values = Mapping[str, float]
"""All numbers of a round: AXES, and each trainer's under trainer<id>/..."""


class Tracker(Protocol):
    """Something that draws the curves of a run. It may fail and hang."""

    newest: int
    """The last round that it has from an earlier start of the run; -1: none."""

    def write(self, values: Values) -> None:
        """Take a round."""

    def close(self, result: Json | None) -> None:
        """End with the run's result, or with None if it has none."""


def check_trackers(tracking: TrackingSettings) -> None:
    """Raise a SettingsError if W&B is to be online and nobody is logged in there, or a package is missing."""
    rule = "the package tensorboard is not installed; pip install tensorboard, or leave it out"
    is_there = not tracking.tensorboard or find_spec("tensorboard") is not None
    require(is_there, "tracking.tensorboard", tracking.tensorboard, rule)
    rule = "nobody is logged in to Weights & Biases; run `wandb login`, set WANDB_API_KEY, or use tracking=offline"
    is_possible = tracking.mode is not TrackingMode.online or _is_logged_in()
    require(is_possible, "tracking.mode", tracking.mode, rule)


def start_trackers(
    tracking: TrackingSettings,
    settings: Json,
    directory: Path,
    earlier_bytes: int,
    tracking_id: str | None,
    report_line: Callable[[str], None],
) -> list["BackgroundTracker"]:
    """Start all trackers that were asked for. One that has seen no earlier start gets all rounds.

    Args:
        settings: all settings of the run, as plain values.
        directory: the run directory, with metrics.jsonl as it is when training begins.
        earlier_bytes: bytes of metrics.jsonl of the rounds before this start.
        tracking_id: id of the run in W&B, if it had one; None: it gets a new one.
        report_line: takes one line for the user.
    """
    trackers: list[BackgroundTracker] = []
    start = partial(BackgroundTracker, directory=directory, earlier_bytes=earlier_bytes, report_line=report_line)
    if tracking.mode is not TrackingMode.disabled:
        run_id = tracking_id or secrets.token_hex(4)  # as long as those that W&B makes

        def open_wandb(last_round: int) -> Tracker:
            return WandbTracker(tracking, settings, directory, run_id, last_round if tracking_id else -1)

        trackers.append(start("Weights & Biases", open_wandb, state={"tracking_id": run_id}))
    if tracking.tensorboard:
        trackers.append(start("TensorBoard", partial(TensorBoardTracker, directory)))
    return trackers


class BackgroundTracker(Sink):
    """A sink that hands rounds to a tracker in a thread, and reports once if that fails."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[int], Tracker],
        directory: Path,
        earlier_bytes: int,
        report_line: Callable[[str], None],
        state: Json | None = None,
    ) -> None:
        """Call `open_tracker` in a thread with the last round of earlier starts (-1: none). `state` is what a later
        start of the run needs to continue."""
        self._directory, self._report_line = directory, report_line
        self._name, self._open_tracker, self._state = name, open_tracker, state or {}
        self._rounds: queue.SimpleQueue[Sequence[TrainerRow] | None] = queue.SimpleQueue()
        self._has_result, self._is_reported = False, False
        self._thread = threading.Thread(target=self._track, args=(earlier_bytes,), name=name, daemon=True)
        self._thread.start()

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Hand over a round, without waiting."""
        if self._rounds.qsize() < MAX_WAITING_ROUNDS:
            self._rounds.put(rows)
        else:
            self._report(f"falls behind and misses rounds from {rows[0].round} on")

    def close(self, result: Json | None) -> None:
        """Let the tracker take the rest, within a bounded time."""
        self._has_result = result is not None
        seconds = PATIENCE_SECONDS if self._has_result else FAILED_SECONDS
        self._rounds.put(None)
        with reported_wait(lambda: f"{self._name}: still at it"):
            self._thread.join(seconds)
        if self._thread.is_alive() and self._has_result:
            self._report(f"was not done {seconds:g} seconds after the end, and is left alone")

    def state(self) -> Json:
        return self._state

    def _track(self, earlier_bytes: int) -> None:
        try:
            with (self._directory / METRICS_FILE).open("rb") as file:
                earlier = parse_rows(file.read(earlier_bytes))[0]
            tracker = self._open_tracker(earlier[-1].round if earlier else -1)
            for values in with_totals(self._all_rounds(earlier)):
                if values["round"] > tracker.newest:
                    tracker.write(values)
            run_file = self._directory / RUN_FILE  # which has the result with the run's totals by now
            tracker.close(json.loads(run_file.read_bytes())["result"] if self._has_result else None)
        except BaseException as error:  # libraries also raise SystemExit
            log.exception("%s failed", self._name)
            self._report(f"failed ({type(error).__name__}: {first_line(error)})")

    def _all_rounds(self, earlier: list[TrainerRow]) -> Iterator[Sequence[TrainerRow]]:
        """The rounds of earlier starts, then those of this one until it ends."""
        for _, rows in itertools.groupby(earlier, lambda row: row.round):
            yield list(rows)
        earlier.clear()
        yield from iter(self._rounds.get, None)

    def _report(self, what: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report_line(f"{self._name} {what}; the run's own records are complete")


def with_totals(rounds: Iterator[Sequence[TrainerRow]]) -> Iterator[Values]:
    """The numbers of every round, with the totals of the run at its end."""
    shared = {"round", "trainer", "pool_tokens", "elapsed_seconds"}  # the same for all trainers, or their names
    updates = sent = 0
    for rows in rounds:
        updates += rows[0].updates or 0
        sent += sum(sum(row.bytes_sent.values()) for row in rows)
        totals = (rows[0].round, updates, rows[0].pool_tokens or 0, sent, rows[0].elapsed_seconds or 0.0)
        yield dict(zip(AXES, totals, strict=True)) | {
            f"trainer{row.trainer}/{name.replace('.', '/')}": value
            for row in rows
            for name, value in flatten(encode(row)).items()
            if isinstance(value, int | float) and math.isfinite(value) and name not in shared
        }


class WandbTracker:
    """Logs every round as a step, and the result as the run's summary.

    Steps cannot be taken back: of rounds that a resumed run repeats, the first values stay.
    """

    def __init__(
        self, tracking: TrackingSettings, settings: Json, directory: Path, run_id: str, last_round: int
    ) -> None:
        """Begin the run of this id in Weights & Biases, or continue it.

        If the record of what was logged is missing, since the directory was on another machine, rounds up to
        `last_round` count as logged.
        """
        import wandb  # half a second

        is_online = tracking.mode is TrackingMode.online or (tracking.mode is TrackingMode.auto and _is_logged_in())
        self._run = wandb.init(
            project=tracking.project,
            name=_shortened(os.environ.get("WANDB_NAME") or directory.resolve().name),
            group=_shortened(tracking.group),
            dir=directory,
            config=settings,
            mode="online" if is_online else "offline",
            id=run_id,
            resume="allow",
            allow_val_change=True,  # a run may resume with another budget
            settings=wandb.Settings(console="off", silent=True),
        )
        for axis in AXES:
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric="round")
        self._newest_file = directory / WANDB / f"{run_id}.round"
        self.newest = int(self._newest_file.read_text()) if self._newest_file.exists() else last_round

    def write(self, values: Values) -> None:
        self._run.log(dict(values), step=int(values["round"]))
        unfinished = self._newest_file.with_suffix(".unfinished")  # a killed run leaves a whole number
        unfinished.write_text(str(int(values["round"])))
        unfinished.replace(self._newest_file)

    def close(self, result: Json | None) -> None:
        if result is not None:
            self._run.summary.update(result)
        self._run.finish(exit_code=0 if result is not None else 1)


class TensorBoardTracker:
    """Writes the numbers of every round as scalars; the step is the round."""

    def __init__(self, directory: Path, last_round: int) -> None:
        """Purge what earlier starts have written after `last_round`."""
        from torch.utils.tensorboard import SummaryWriter

        folder = directory / TENSORBOARD
        self.newest = last_round if any(folder.glob("events.*")) else -1
        self._writer: Any = SummaryWriter(str(folder), purge_step=self.newest + 1, flush_secs=5)

    def write(self, values: Values) -> None:
        for name, value in values.items():
            if name != "round":
                self._writer.add_scalar(name, value, int(values["round"]))

    def close(self, result: Json | None) -> None:
        self._writer.close()


def _is_logged_in() -> bool:
    """Whether there are credentials; they are not tried."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    return bool(wandb.login(prompt=False, verify=False))


def _shortened(name: str | None) -> str | None:
    """`name` within the limit; one that is too long ends in its digest, so that names stay different."""
    if name is None or len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
