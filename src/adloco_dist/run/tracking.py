"""Trackers of a run: Weights & Biases and TensorBoard, each in a process of its own that follows the run's records.

Training hands them nothing and waits for nothing, so that a tracker that fails, hangs or falls behind costs it nothing.
"""

import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from adloco_dist.config import SettingsError, TrackingMode, TrackingSettings
from adloco_dist.run.directory import LOGS_DIRECTORY
from adloco_dist.run.rows import Record
from adloco_dist.terminal import reported_wait
from adloco_dist.text import one_line, reason

FOLLOW = "adloco_dist.run.follow"
WANDB, TENSORBOARD = "wandb", "tensorboard"
"""The trackers, and the folders of a run directory that hold what they write."""
NAMES = {WANDB: "Weights & Biases", TENSORBOARD: "TensorBoard"}
ID_BYTES = 4
"""An id has eight characters, like those that Weights & Biases makes."""


def check_trackers(tracking: TrackingSettings) -> None:
    """Check that the trackers that were asked for can be used, as far as that is known before training.

    Raises:
        SettingsError: W&B is to be online and nobody is logged in there, or a package is missing.
    """
    if tracking.tensorboard and find_spec("tensorboard") is None:
        rule = "the package tensorboard is not installed; pip install tensorboard, or leave it out"
        raise SettingsError.of("tracking.tensorboard", tracking.tensorboard, rule)
    if tracking.mode is TrackingMode.online:
        from adloco_dist.run.weights_and_biases import is_logged_in  # half a second

        rule = "nobody is logged in to Weights & Biases; run `wandb login`, set WANDB_API_KEY, or use tracking=offline"
        if not is_logged_in():
            raise SettingsError.of("tracking.mode", tracking.mode, rule)


def start_trackers(
    tracking: TrackingSettings,
    directory: Path,
    earlier_bytes: int,
    tracking_id: str | None,
    report_line: Callable[[str], None],
) -> list["TrackerProcess"]:
    """Start the processes of all trackers that were asked for. One that has seen no earlier start gets all rounds.

    Args:
        directory: the run directory, with run.json and metrics.jsonl as they are when training begins.
        earlier_bytes: bytes of metrics.jsonl of the rounds before this start.
        tracking_id: id of the run in W&B, if it had one; None: it gets a new one.
        report_line: takes one line for the user.
    """

    def start(tracker: str, is_known: bool, state: Record, *options: str) -> TrackerProcess:
        skipped = str(earlier_bytes if is_known else 0)
        patience = str(tracking.patience_seconds)
        command = [sys.executable, "-m", FOLLOW, tracker, str(directory), "--skip-bytes", skipped, *options]
        log = directory / LOGS_DIRECTORY / f"{tracker}.log"
        return TrackerProcess(
            NAMES[tracker], [*command, "--patience", patience], log, tracking.patience_seconds, report_line, state
        )

    trackers = []
    if tracking.mode is not TrackingMode.disabled:
        run_id = tracking_id or secrets.token_hex(ID_BYTES)
        # Where the newest round in W&B is known, the process starts after it, and adds what an earlier one missed.
        was_elsewhere = tracking_id is not None and not newest_round_file(directory, run_id).exists()
        trackers.append(start(WANDB, was_elsewhere, {"tracking_id": run_id}, "--id", run_id))
    if tracking.tensorboard:
        has_curves = any((directory / TENSORBOARD).glob("events.*"))
        trackers.append(start(TENSORBOARD, has_curves, {}))
    return trackers


def newest_round_file(directory: Path, run_id: str) -> Path:
    """The file with the number of the newest round that was logged in W&B."""
    return directory / WANDB / f"{run_id}.round"


class TrackerProcess:
    """A sink that writes nothing itself: it starts the process, reports once if that fails, and ends it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        patience_seconds: float,
        report_line: Callable[[str], None],
        state: Record | None = None,
    ) -> None:
        """
        Args:
            command: what follows the records until its standard input ends.
            log: takes all that it prints; the last line says why it failed.
            patience_seconds: how long it may take after the end of a run.
            state: what a later start of the run needs to continue.
        """
        self._name, self._log, self._patience = name, log, patience_seconds
        self._report_line, self._state = report_line, state or {}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with log.open("ab") as output:
                self._earlier_bytes = output.tell()
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=output,
                    start_new_session=True,  # out of the terminal's reach: it may take a moment longer than the run
                )  # fmt: skip
        except OSError as error:
            self._report(f"cannot be started ({reason(error)})")

    def write(self, records: Sequence[Record]) -> None:
        """Report it if the process has ended."""
        if self._process and self._process.poll() is not None:
            self._process.communicate()  # only closes what led to it
            self._report(self._failure(self._process))
            self._process = None

    def close(self, result: Record | None) -> None:
        """Let the process take the rest. A run that failed does not wait for it: it then ends by itself."""
        process, self._process = self._process, None
        if process is None:
            return
        if result is None:
            assert process.stdin
            process.stdin.close()
            return
        try:
            with reported_wait(lambda: f"{self._name}: still at it"):
                process.communicate(b"\n", timeout=self._patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._report(f"was not done after tracking.patience_seconds={self._patience:g}, and was ended")
            return
        if process.returncode:
            self._report(self._failure(process))

    def state(self) -> Record:
        return self._state

    def _failure(self, process: "subprocess.Popen[bytes]") -> str:
        """Why a process has ended, as it said in the last line of its log."""
        try:
            lines = self._log.read_bytes()[self._earlier_bytes :].decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return f"failed ({one_line(lines[-1]) if lines else f'exit code {process.returncode}'})"

    def _report(self, what: str) -> None:
        self._report_line(f"{self._name} {what}; the run's own records are complete (log: {self._log})")
