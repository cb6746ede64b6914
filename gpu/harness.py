"""Runs the cases of a command one after the other, each in a process of its own.

A case that hangs is ended at its time limit, with all that it has started; one that crashes ends alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from checkout import CASE
from common import machine, processes_with
from rich.console import Console
from rich.table import Table

RESULT_FILE = "result.json"
LEAST_SECONDS = 20.0
"""With less time left no further case is begun."""


class SkippedError(Exception):
    """A case cannot be run here; says why."""


@dataclass(frozen=True)
class Here:
    """Where a case runs."""

    device: torch.device
    folder: Path
    """For its files: empty, and kept."""

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
    """Variables that must be there when its process starts."""


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
    elif options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU that torch {torch.__version__} can use: nothing was run (--device cpu tries the code out)")
    elif CASE in os.environ:
        _run_here(next(case for case in cases if case.name == os.environ[CASE]), options.device, options.out)
    else:
        out = options.out or Path("runs") / f"{command}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
        out.mkdir(parents=True)
        asked = [case for case in cases if any(text in case.name for text in options.only)]
        results = _run_all(asked, options.device, options.seconds, out.resolve())
        _show(command, results, out)
        sys.exit(any(result.status == "failed" for result in results))


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"{command}: see docs/gpus.md. {__doc__}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only try the code out")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name contains a TEXT")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all cases together (%(default)g)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new one for the results (runs/COMMAND-TIME)")
    parser.add_argument("--list", action="store_true", help="print the cases' names; run nothing")
    return parser


def _run_here(case: Case, device: str, folder: Path) -> None:
    """Run a case in this process, and leave its result in its folder."""
    start = time.monotonic()
    figures: Mapping[str, float] = {}
    status, reason = "passed", ""
    try:
        figures = case.run(Here(torch.device(device), folder))
    except SkippedError as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:  # whatever it is
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}"
    result = Result(case.name, status, round(time.monotonic() - start, 1), dict(figures), reason)
    (folder / RESULT_FILE).write_text(json.dumps(asdict(result)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # a thread or a process group that hangs has been judged already


def _run_all(cases: Sequence[Case], device: str, seconds: float, out: Path) -> list[Result]:
    deadline = time.monotonic() + seconds
    results = []
    with (out / "results.jsonl").open("w", encoding="utf-8") as file:
        _add_line(file, {"machine": machine(), "device": device, "command": sys.argv})
        for number, case in enumerate(cases, 1):
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                result = Result(case.name, "skipped", reason="not run: time")
            else:
                print(f"{number} of {len(cases)}: {case.name}", flush=True)
                result = _run_apart(case, device, left, out / re.sub(r"\W+", "-", case.name))
            results.append(result)
            _add_line(file, asdict(result))
            print(f"  {result.status} after {result.seconds:.0f} s. {_told(result)}", flush=True)
    return results


def _add_line(file: TextIO, content: Mapping[str, object]) -> None:
    file.write(json.dumps(content) + "\n")
    file.flush()


def _run_apart(case: Case, device: str, seconds_left: float, folder: Path) -> Result:
    """Run a case in a process of its own, on one GPU."""
    folder.mkdir()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, CASE: case.name, **case.environment}
    command = [sys.executable, sys.argv[0], "--device", device, "--out", str(folder)]
    start = time.monotonic()
    with (folder / "output.log").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(min(case.seconds, seconds_left))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for left_over in processes_with(CASE, case.name):
                left_over.kill()
            process.wait()
    seconds = round(time.monotonic() - start, 1)
    if (folder / RESULT_FILE).exists():
        return Result(**json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    if code is None and seconds_left < case.seconds:
        return Result(case.name, "skipped", seconds, reason="not run to its end: time")
    told = f"still ran after {seconds:.0f} s" if code is None else f"ended with code {code}, without a result"
    return Result(case.name, "failed", seconds, reason=f"{told}; the last line: {_last_line(folder / 'output.log')}")


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "none"


def _told(result: Result) -> str:
    """Its figures, or the first line of why there are none."""
    figures = ", ".join(f"{name} = {value:.4g}" for name, value in result.figures.items())
    return result.reason.partition("\n")[0][:300] or figures


def _show(command: str, results: Sequence[Result], out: Path) -> None:
    table = Table(title=f"{command} on {machine()}", title_justify="left")
    for column in ("case", "", "seconds", "figures, or why not"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(result.name, result.status, f"{result.seconds:.0f}", _told(result), end_section=True)
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    console.print(table)
    counts = {status: sum(one.status == status for one in results) for status in ("passed", "failed", "skipped")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), f"({out}/results.jsonl)")
