"""Several runs at one time on this machine, each with its share of the devices."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

from adloco_dist.cluster.signals import STOP_SIGNALS, heeded
from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, SettingsError
from adloco_dist.terminal import report_error, report_line, reported_wait
from adloco_dist.text import first_line, reason

T = TypeVar("T")
TAIL_BYTES = 4096
"""Bytes at the end of a log in which its last line is looked for."""


@dataclass(frozen=True)
class Slot:
    """What one run at a time may use of this machine."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    """GPUs as CUDA_VISIBLE_DEVICES names them; empty on a machine without."""


def deal_slots(num_jobs: int) -> list[Slot]:
    """The machine in `num_jobs` parts: its GPUs, if it has any, and its cores.

    Raises:
        SettingsError: there are fewer GPUs (or, without GPUs, cores) than jobs.
    """
    if num_jobs < 1:
        raise SettingsError.of("--jobs", num_jobs, "must be >= 1")
    import torch

    cores = sorted(os.sched_getaffinity(0))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[:num_gpus] if visible else [str(gpu) for gpu in range(num_gpus)]
    devices, kind = (gpus, "GPUs") if gpus else (cores, "cores")
    if num_jobs > len(devices):
        raise SettingsError.of("--jobs", num_jobs, f"must be <= {len(devices)}, the {kind} of this machine")
    return [Slot(tuple(_part(cores, job, num_jobs)), tuple(_part(gpus, job, num_jobs))) for job in range(num_jobs)]


def run_here(jobs: Sequence[tuple[str, list[str], Path]], slots: Sequence[Slot], program: Sequence[str]) -> list[int]:
    """Run drivers, as many at a time as there are slots; a run that fails fails alone. Main thread only.

    Ctrl-C and the other requests to stop reach all drivers that run, which end their rounds, and no further one is
    started.

    Args:
        jobs: for each its name, the driver's arguments, and the file that takes what it prints.
        program: the arguments of the interpreter that start a driver.

    Returns:
        The drivers' exit codes.
    """
    free: SimpleQueue[Slot] = SimpleQueue()
    for slot in slots:
        free.put(slot)
    running = _Running(program)
    previous = {number: signal.signal(number, running.stop) for number in heeded(STOP_SIGNALS)}

    def run_one(number: int) -> int:
        name, arguments, log = jobs[number]
        slot = free.get()
        try:
            if running.stopping:
                return EXIT_STOPPED
            report_line(f"run {number + 1} of {len(jobs)}: {name} (log: {log})")
            with reported_wait(lambda: f"run {number + 1} of {len(jobs)}: {_newest_line(log)}"):
                code = running.run(arguments, log, slot if len(slots) > 1 else None)
        except OSError as error:  # of its log, or of a machine that takes no further process
            report_error(f"error: {name} cannot be started: {first_line(error)}")
            return EXIT_FAILURE
        finally:
            free.put(slot)
        if running.stopping and code < 0:  # asked before it could listen
            code = EXIT_STOPPED
        detail = "was stopped" if code == EXIT_STOPPED else f"ended with code {code}"
        report_line(f"run {number + 1} of {len(jobs)}: {name} {detail}")
        return code

    with ThreadPoolExecutor(len(slots)) as executor:
        codes = list(executor.map(run_one, range(len(jobs))))
    for number, handler in previous.items():
        signal.signal(number, handler)
    return codes


@dataclass
class _Running:
    """The drivers that run now."""

    program: Sequence[str]
    drivers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    stopping: bool = False

    def run(self, arguments: Sequence[str], log: Path, slot: Slot | None) -> int:
        command = [sys.executable, *self.program, *arguments]
        environment = dict(os.environ)
        if slot and slot.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        with log.open("a", encoding="utf-8") as output:
            driver = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,  # out of the terminal's reach: `stop` passes on what it sends
            )  # fmt: skip
        if slot:
            os.sched_setaffinity(driver.pid, slot.cores)
        self.drivers.append(driver)
        if self.stopping:  # since it was looked at: this one has not heard of it
            driver.send_signal(signal.SIGTERM)
        code = driver.wait()
        self.drivers.remove(driver)
        return code

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Ask all drivers to end their rounds; a second Ctrl-C ends them at once."""
        again, self.stopping = self.stopping and signum == signal.SIGINT, True
        report_error("stopping: the runs end their rounds (Ctrl-C again: stop at once)")
        for driver in list(self.drivers):
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


def _part(items: Sequence[T], number: int, num_parts: int) -> Sequence[T]:
    """Part `number` of a sequence dealt evenly."""
    return items[len(items) * number // num_parts : len(items) * (number + 1) // num_parts]
