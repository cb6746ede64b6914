"""The three commands: they run cases with pytest, several at once, then those that need the device alone.

A case that hangs is ended at its time limit, with all that it has started; one that crashes ends alone.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from checkout import NVML_CHECK
from common import machine

AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Cases that run at the same time, of those that do not need the device alone."""
ASKED = "ADLOCO_GPU_ASKED"
"""In the environment of pytest's processes: what was asked for, as JSON."""


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

    def in_words(self) -> str:
        """Its figures, or the first line of why there are none."""
        figures = ", ".join(f"{name} = {value:.4g}" for name, value in self.figures.items())
        return self.reason.partition("\n")[0][:300] or figures


@dataclass(frozen=True)
class Asked:
    """What a command's user asked for, as pytest's processes read it."""

    modules: tuple[str, ...]
    """In which lists called CASES are."""
    device: str
    only: tuple[str, ...]
    """Texts of which the name of a case contains one."""
    deadline: float
    """In seconds since the epoch."""
    out: Path
    alone: bool = False
    """Whether cases that need the device alone are run, or the others."""

    @classmethod
    def from_environment(cls) -> "Asked":
        asked = json.loads(os.environ[ASKED])
        return cls(**{**asked, "out": Path(asked["out"])})

    def cases(self) -> list[Case]:
        """Those that share the device begin with the longest."""
        cases = [case for case in all_cases(self.modules, self.only) if case.alone == self.alone]
        return cases if self.alone else sorted(cases, key=lambda case: -case.seconds)

    def run(self, at_once: int) -> None:
        """Let pytest run them, in processes of its own."""
        if not self.cases():
            return
        os.environ[ASKED] = json.dumps({**asdict(self), "out": str(self.out)})
        ini, file = (str(Path(__file__).with_name(name)) for name in ("pytest.ini", "test_cases.py"))
        many = ("-n", str(at_once), "--dist", "load", "--maxschedchunk", "1")
        pytest.main(["-c", ini, "-q", "-s", *(many if at_once > 1 else ("-p", "no:xdist")), file])


def all_cases(modules: Sequence[str], only: Sequence[str]) -> list[Case]:
    """The cases of these modules whose names contain one of the texts."""
    cases = [case for module in modules for case in importlib.import_module(module).CASES]
    return [case for case in cases if any(text in case.name for text in only)]


def main(command: str, modules: Sequence[str]) -> None:
    """Run the cases that the command line asks for; ends the process: 1 if one failed, else 0, also without a GPU.

    Args:
        command: names the results.
        modules: their lists `CASES` are run.
    """
    options = _parser(command).parse_args()
    if options.list:
        print("\n".join(f"{case.name} ({case.seconds:.0f} s at most)" for case in all_cases(modules, [""])))
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
    results = out / "results.jsonl"
    first_line = {"machine": where, "device": options.device, "command": sys.argv}
    results.write_text(json.dumps(first_line) + "\n", encoding="utf-8")
    for alone in (False, True):
        asked = Asked(
            tuple(modules), options.device, tuple(options.only), time.time() + options.seconds, out.resolve(), alone
        )
        start = time.time()
        asked.run(1 if alone else max(1, options.at_once))
        options.seconds -= time.time() - start
    lines = results.read_text(encoding="utf-8").splitlines()[1:]
    by_name = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}
    order = [case.name for case in all_cases(modules, options.only)]
    _show(f"{command} on {where}", [by_name[name] for name in order if name in by_name], out)
    sys.exit(any(result.status == "failed" for result in by_name.values()) or len(by_name) < len(order))


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
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_send_gpu_and_machine, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _send_gpu_and_machine(pipe: Connection) -> None:
    pipe.send((torch.cuda.is_available(), machine()))


def _show(title: str, results: Sequence[Result], out: Path) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("case", "", "seconds", "figures, or why not"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(result.name, result.status, f"{result.seconds:.0f}", result.in_words(), end_section=True)
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    console.print(table)
    counts = {status: sum(result.status == status for result in results) for status in ("passed", "failed", "skipped")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), f"({out}/results.jsonl)")
