"""Several runs at one time on this machine, each with its share of the devices."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import numpy as np

from adloco_dist.cluster.signals import STOP_SIGNALS, handling
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, require
from adloco_dist.sweep.points import Point
from adloco_dist.terminal import report_error, report_line, reported_wait
from adloco_dist.text import first_line, reason

TAIL_BYTES = 4096
"""Bytes at the end of a log in which its last line is looked for."""


@dataclass(frozen=True)
class _Slot:
    """What one run at a time may use of this machine."""

    cores: Sequence[int]
    gpus: Sequence[str]
    """GPUs as CUDA_VISIBLE_DEVICES names them; empty on a machine without."""


def _deal_slots(num_jobs: int) -> list[_Slot]:
    """The machine in `num_jobs` parts: its GPUs, if it has any, and its cores."""
    require(num_jobs >= 1, "--jobs", num_jobs, "must be >= 1")
    from adloco_dist.cluster.devices import num_gpus  # with torch: a second

    cores = sorted(os.sched_getaffinity(0))
    count = num_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[:count] if visible else [str(gpu) for gpu in range(count)]
    devices, kind = (gpus, "GPUs") if gpus else (cores, "cores")
    require(num_jobs <= len(devices), "--jobs", num_jobs, f"must be <= {len(devices)}, the {kind} of this machine")
    parts = [np.array_split(devices, num_jobs) for devices in (cores, gpus)]
    return [_Slot(of_cores.tolist(), of_gpus.tolist()) for of_cores, of_gpus in zip(*parts, strict=True)]


class LocalDrivers:
    """Runs drivers on this machine, several at a time; the failure of one ends no other.

    Ctrl-C and the other requests to stop reach all drivers that run, which end their rounds, and no further one is
    started.
    """

    def __init__(self, num_jobs: int, program: Sequence[str]) -> None:
        """Divide the machine among `num_jobs` drivers; `program` has the arguments of the interpreter that start one.

        Raises:
            SettingsError: there are fewer GPUs (or, without GPUs, cores) than jobs.
        """
        self._program, self._num_slots = program, num_jobs
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for slot in _deal_slots(num_jobs):
            self._free.put(slot)
        self._drivers: list[subprocess.Popen[bytes]] = []
        self._is_stopping = False

    def run_all(self, points: Sequence[Point]) -> list[int]:
        """Run a driver for every point; their exit codes. Main thread only."""
        titles = [f"run {number} of {len(points)}" for number in range(1, len(points) + 1)]
        with handling(STOP_SIGNALS, self._stop), ThreadPoolExecutor(self._num_slots) as executor:
            return list(executor.map(self._run, points, titles))

    def _run(self, point: Point, title: str) -> int:
        """Run a driver once a slot is free; its exit code."""
        slot = self._free.get()
        try:
            if self._is_stopping:
                return EXIT_STOPPED
            report_line(f"{title}: {point.name} (log: {point.log})")
            with reported_wait(lambda: f"{title}: {_newest_line(point.log)}"):
                code = self._run_driver(point, slot)
        except OSError as error:  # of its log, or of a machine that takes no further process
            report_error(f"error: {point.name} cannot be started: {first_line(error)}")
            return EXIT_FAILURE
        finally:
            self._free.put(slot)
        if self._is_stopping and code < 0:  # asked before it could listen
            code = EXIT_STOPPED
        report_line(f"{title}: {point.name} " + ("was stopped" if code == EXIT_STOPPED else f"ended with code {code}"))
        return code

    def _run_driver(self, point: Point, slot: _Slot) -> int:
        environment, has_part = dict(os.environ), self._num_slots > 1
        if slot.gpus and has_part:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        with point.log.open("a", encoding="utf-8") as output:
            driver = subprocess.Popen(
                [sys.executable, *self._program, *point.overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # out of the terminal's reach: `_stop` passes on what it sends
            )
        if has_part:
            os.sched_setaffinity(driver.pid, slot.cores)
        self._drivers.append(driver)
        if self._is_stopping:  # since it was looked at: this one has not heard of it
            driver.send_signal(signal.SIGTERM)
        code = driver.wait()
        self._drivers.remove(driver)
        return code

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Ask all drivers to end their rounds; a second Ctrl-C ends them at once."""
        again, self._is_stopping = self._is_stopping and signum == signal.SIGINT, True
        report_error("stopping: the runs end their rounds (Ctrl-C again: stop at once)")
        for driver in list(self._drivers):
            driver.send_signal(signal.SIGINT if again else signal.SIGTERM)


def _newest_line(log: Path) -> str:
    """What a run has printed last."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read ({reason(error)})"
    return lines[-1] if lines else "has printed nothing yet"
