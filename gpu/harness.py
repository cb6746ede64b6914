"""Runs the cases of a command, each in a process of its own: several at once, then those that need the device alone.

A case that hangs is ended at its time limit, with all that it has started; one that crashes ends alone. Processes are
forked, for importing everything anew takes ten seconds and more; so this one must never start CUDA, nor compute.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TextIO

import psutil
import torch
from rich.console import Console
from rich.table import Table

from checkout import CASE, NVML_CHECK
from common import machine, processes_with

RESULT_FILE = "result.json"
LEAST_SECONDS = 20.0
"""With less time left no further case is begun."""
AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Cases that run at the same time, of those that do not need the device alone."""
FORK = multiprocessing.get_context("fork")


class SkippedError(Exception):
    """A case cannot be run here; says why."""


@dataclass(frozen=True)
class Here:
    """Where a case runs."""

    device: torch.device
    folder: Path
    """For its files: empty, and kept."""

    @classmethod
    def cpu(cls, folder: Path) -> "Here":
        """The device that results are compared with."""
        return cls(torch.device("cpu"), folder)

    @property
    def is_cuda(self) -> bool:
        """False: the code is only tried out, and figures mean nothing."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Case:
    """Something to check or to measure."""

    name: str
    run: Callable[[Here], Mapping[str, float]]
    """Returns its figures; raises AssertionError where the check fails, SkippedError where it cannot be made."""
    seconds: float = 60.0
    """After which it is ended, and has failed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be there when its process starts CUDA, and all that it starts."""
    alone: bool = False
    """Whether others on the device would change what it finds: it measures memory or time."""


@dataclass(frozen=True)
class Result:
    """What became of a case."""

    name: str
    status: str
    """passed, failed or skipped."""
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it failed or was skipped; all that it printed is in output.log of its folder."""


def main(command: str, cases: Sequence[Case]) -> None:
    """Run the cases that the command line asks for; ends the process: 1 if one failed, else 0, also without a GPU.

    Args:
        command: names the results.
    """
    options = _parser(command).parse_args()
    if options.list:
        print("\n".join(f"{case.name} ({case.seconds:.0f} s at most)" for case in cases))
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible if options.device == "cuda" else ""
    os.environ.pop(NVML_CHECK, None)  # cases ask as users do
    has_gpu, where = _gpu_and_machine()
    if options.device == "cuda" and not has_gpu:
        print(f"no GPU that torch {torch.__version__} can use: nothing was run (--device cpu tries the code out)")
        return
    out = options.out or Path("runs") / f"{command}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
    out.mkdir(parents=True)
    asked = [case for case in cases if any(text in case.name for text in options.only)]
    with (out / "results.jsonl").open("w", encoding="utf-8") as file:
        _add_line(file, {"machine": where, "device": options.device, "command": sys.argv})
        results = []
        for result in _run_all(asked, options.device, options.seconds, options.at_once, out.resolve()):
            results.append(result)
            _add_line(file, asdict(result))
            print(f"{len(results)} of {len(asked)}: {result.name}: {result.status} after {result.seconds:.0f} s")
            print(f"  {_reported(result)}", flush=True)
    order = [case.name for case in asked]
    _show(f"{command} on {where}", sorted(results, key=lambda result: order.index(result.name)), out)
    sys.exit(any(result.status == "failed" for result in results))


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"{command}: see docs/guide/gpus.md. {__doc__}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only try the code out")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name contains a TEXT")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all cases together (%(default)g)")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="cases, where they may (%(default)d)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new one for the results (runs/COMMAND-TIME)")
    parser.add_argument("--list", action="store_true", help="print the cases' names; run nothing")
    return parser


def _gpu_and_machine() -> tuple[bool, str]:
    """Whether torch can use a GPU, and the machine in one line; asked in a process of its own, which may start CUDA."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send_gpu_and_machine, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _send_gpu_and_machine(pipe: Connection) -> None:
    pipe.send((torch.cuda.is_available(), machine()))


def _run_here(case: Case, device: str, folder: Path) -> None:
    """Run a case in this process, which was forked for it, and leave its result in its folder."""
    os.setsid()
    os.environ.update({CASE: case.name, **case.environment})
    with (folder / "output.log").open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    start = time.monotonic()
    figures: Mapping[str, float] = {}
    status, reason = "passed", ""
    try:
        figures = case.run(Here(torch.device(device, 0), folder))
    except SkippedError as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:  # whatever it is
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}"
    result = Result(case.name, status, round(time.monotonic() - start, 1), dict(figures), reason)
    (folder / RESULT_FILE).write_text(json.dumps(asdict(result)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # a thread or a process group that hangs has been judged already


def _run_all(cases: Sequence[Case], device: str, seconds: float, at_once: int, out: Path) -> Iterator[Result]:
    """The results as cases end: first of those that share the device, the longest first, then of the others."""
    deadline = time.monotonic() + seconds
    sharing = sorted((case for case in cases if not case.alone), key=lambda case: -case.seconds)
    yield from _run_some(sharing, max(1, at_once), device, deadline, out)
    yield from _run_some([case for case in cases if case.alone], 1, device, deadline, out)


def _run_some(cases: Sequence[Case], at_once: int, device: str, deadline: float, out: Path) -> Iterator[Result]:
    waiting, running = list(cases), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                case, now = waiting.pop(0), time.monotonic()
                if deadline - now < LEAST_SECONDS:
                    yield Result(case.name, "skipped", reason="not run: time")
                else:
                    running.append(_Running(case, device, deadline, out / re.sub(r"\W+", "-", case.name)))
            until = min((one.end for one in running), default=0.0)
            ended = wait([one.process.sentinel for one in running], max(0.0, until - time.monotonic()))
            for one in list(running):
                has_ended = one.process.sentinel in ended
                if has_ended or time.monotonic() >= one.end:
                    running.remove(one)
                    yield one.result(has_ended)
    finally:
        for one in running:
            one.kill()


class _Running:
    """A case in a process of its own."""

    def __init__(self, case: Case, device: str, deadline: float, folder: Path) -> None:
        folder.mkdir()
        self._case, self._folder, self._start = case, folder, time.monotonic()
        self.end = min(self._start + case.seconds, deadline)
        """When its time is over."""
        self.process: ForkProcess = FORK.Process(target=_run_here, args=(case, device, folder))
        self.process.start()

    def kill(self) -> None:
        """End what is left of it: its session, and what has left that; those were started with its variable."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have had its session yet
        for left_over in processes_with(CASE, self._case.name):
            with suppress(psutil.Error):
                left_over.kill()
        self.process.join()

    def result(self, has_ended: bool) -> Result:
        """What it left, or why there is nothing; it is over then."""
        self.kill()
        name, seconds = self._case.name, round(time.monotonic() - self._start, 1)
        if (self._folder / RESULT_FILE).exists():
            return Result(**json.loads((self._folder / RESULT_FILE).read_text(encoding="utf-8")))
        if not has_ended and seconds < self._case.seconds:
            return Result(name, "skipped", seconds, reason="not run to its end: time")
        how = f"ended with code {self.process.exitcode}, without a result"
        how = how if has_ended else f"still ran after {seconds:.0f} s"
        line = _last_line(self._folder / "output.log")
        return Result(name, "failed", seconds, reason=f"{how}; the last line: {line}")


def _add_line(file: TextIO, content: Mapping[str, object]) -> None:
    file.write(json.dumps(content) + "\n")
    file.flush()


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "none"


def _reported(result: Result) -> str:
    """Its figures, or the first line of why there are none."""
    figures = ", ".join(f"{name} = {value:.4g}" for name, value in result.figures.items())
    return result.reason.partition("\n")[0][:300] or figures


def _show(title: str, results: Sequence[Result], out: Path) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("case", "", "seconds", "figures, or why not"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(result.name, result.status, f"{result.seconds:.0f}", _reported(result), end_section=True)
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    console.print(table)
    counts = {status: sum(one.status == status for one in results) for status in ("passed", "failed", "skipped")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), f"({out}/results.jsonl)")
