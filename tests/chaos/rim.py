"""What a clumsy or unlucky user meets: no traceback, no silence, no wrong number, nothing left behind.

Every case is a command in a folder of its own. Its output is read as it comes: what was owed must be there, at most one
line may tell a mistake, nothing of a library's insides may be seen, and nobody is left without a word for long.
"""

import codecs
import os
import pty
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import psutil

from chaos.rim_case import CORPUS, DRIVER, GROUP, HANG_UP, HERE, PORT, RANK, TREE, Act, Case, train
from chaos.rim_corpora import corpus_cases
from chaos.rim_files import file_cases
from chaos.rim_mistakes import mistake_cases
from chaos.rim_runs import run_cases
from helpers.commands import environment, processes_with
from helpers.ports import free_port

MARK = "CHAOS_RIM"
"""In the environment of a case's processes: its folder."""
INSIDES = ("Traceback (most recent call last)", "frame #", "Exception raised from")
GONE_SECONDS = 10.0
"""Within this after a command's end none of its processes is left."""
END_CHARACTERS = 1500
"""Of an output, when a case is wrong."""
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
"""So that no case depends on a network: connections to the hub are refused."""


class Running:
    """A command of a case, and what it has printed so far, with times."""

    def __init__(self, case: Case, words: tuple[str, ...], folder: Path, variables: dict[str, str]) -> None:
        if case.redirection:
            words = ("bash", "-c", f"{shlex.join(words)} {case.redirection}; exit ${{PIPESTATUS[0]}}")
        if case.is_terminal:
            self._out, output = pty.openpty()
            words = ("setsid", "--ctty", *words)
        else:
            self._out, output = os.pipe()
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            words, cwd=folder, env=variables, stdin=output if case.is_terminal else subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=not case.is_terminal,
        )  # fmt: skip
        os.close(output)
        self.output, self.reported_at = "", [self.start]
        self.refused_seconds: float | None = None
        self._changed, self._is_closed, self._hang_up = threading.Condition(), False, threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def act(self, act: Act) -> None:
        """Wait for the moment of the act, and do it; nothing where the command has ended before."""
        if isinstance(act.after, str):
            until = act.after
            with self._changed:
                self._changed.wait_for(lambda: until in self.output or self._is_closed, 60.0)
        else:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(act.after)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(act.later_seconds)
        if self.process.poll() is not None:
            return
        if act.what == HANG_UP:
            self._hang_up.set()
            return
        number = signal.Signals(act.what)
        if act.whom == GROUP:
            os.killpg(self.process.pid, number)
            return
        process = psutil.Process(self.process.pid)
        for target in [process, *(process.children(recursive=True) if act.whom == TREE else [])]:
            with suppress(psutil.NoSuchProcess):
                target.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Whether the command has ended within so many seconds of its start, and all its output is read."""
        try:
            self.process.wait(max(0.0, self.start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(2.0)
        return True

    @property
    def silent_seconds(self) -> float:
        times = list(self.reported_at)
        return max(after - before for before, after in pairwise(times)) if len(times) > 1 else 0.0

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while not self._is_closed:
            chunk = b""
            if not self._hang_up.is_set():
                if not select.select([self._out], [], [], 0.1)[0]:
                    continue
                with suppress(OSError):  # of a terminal that nobody holds any more
                    chunk = os.read(self._out, 1 << 16)
            with self._changed:
                self.reported_at.append(time.monotonic())
                self.output += decoder.decode(chunk).replace("\r\n", "\n")
                if self.refused_seconds is None and "error: " in self.output:
                    self.refused_seconds = self.reported_at[-1] - self.start
                self._is_closed = not chunk
                self._changed.notify_all()
        os.close(self._out)


def try_case(case: Case, template: Path, folder: Path) -> tuple[list[str], list[Running]]:
    """What is wrong with how a case ends, and its commands."""
    folder.mkdir()
    shutil.copy(template / CORPUS, folder)
    if case.has_run:
        shutil.copytree(template / "run", folder / "run")
    for prepare in case.prepare:
        prepare(folder)
    before, mark = sorted(folder.rglob("*")), {MARK: str(folder)}
    variables = {**environment(), **NO_HUB, "HF_HOME": str(template / "hub"), **mark, **case.environment}
    problems = []
    with ExitStack() as stack:
        port = free_port()
        if case.beside:
            stack.enter_context(case.beside(port))
        commands = [(case.words, folder)]
        if case.second:
            (folder / "second").mkdir(exist_ok=True)
            before = sorted(folder.rglob("*"))
            commands.append((case.second, folder / "second"))
        running = []
        for words, where in commands:
            typed = tuple(word.replace(HERE, str(folder)).replace(PORT, str(port)) for word in words)
            running.append(Running(case, typed, where, variables))
        for act in case.acts:
            running[0].act(act)
        for command in running:
            if not command.wait(case.limit_seconds):
                problems.append(f"did not end within {case.limit_seconds:g} s")
    left = psutil.wait_procs(processes_with(MARK, str(folder)), timeout=0 if problems else GONE_SECONDS)[1]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if left and not problems:
        problems.append(f"{len(left)} of its processes were left")
    for command in running:
        command.wait(float("inf"))
        problems += mistakes(case, command)
    if case.is_refused and (after := sorted(folder.rglob("*"))) != before:
        changed = {str(path.relative_to(folder)) for path in {*after}.symmetric_difference(before)}
        problems.append(f"a refusal has made or removed {', '.join(sorted(changed))}")
    problems += [f"{pattern} is missing" for pattern in case.leaves if not any(folder.glob(pattern))]
    return problems, running


def mistakes(case: Case, ended: Running) -> list[str]:
    """What is wrong with what a command has printed, and its exit code."""
    problems, output, code = [], ended.output, ended.process.returncode
    if code not in case.codes:
        problems.append(f"ended with {code}, not {' or '.join(map(str, case.codes))}")
    problems += [f"{words!r} is not reported" for words in case.detail if words not in output]
    problems += [f"{words!r} is reported" for words in (*INSIDES, *case.unreported) if words in output]
    errors = re.findall(r"^error: .*", output, re.MULTILINE)
    if len(errors) > 1:
        problems.append(f"{len(errors)} lines tell a mistake")
    if ended.silent_seconds > case.silence_seconds:
        problems.append(f"silent for {ended.silent_seconds:.1f} s")
    return problems


def make_template(folder: Path) -> None:
    """What cases begin with: a corpus, and a finished run."""
    words = [f"{number * number} is the square of {number}.\n" for number in range(1500)]
    (folder / CORPUS).write_text("".join(words), encoding="utf-8")
    subprocess.run(train("run.directory=run"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    checkpoints = list((folder / "run" / "checkpoints").iterdir())  # one is due later where the last is being written
    assert len(checkpoints) == 2, checkpoints


def all_cases() -> list[Case]:
    """Every case, in an order that does not change; names are unique."""
    cases = [*mistake_cases(), *file_cases(), *corpus_cases(), *run_cases()]
    names = [case.name for case in cases]
    assert len({*names}) == len(names), sorted(name for name in names if names.count(name) > 1)
    return cases


class Tally:
    """What became of the cases so far."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {DRIVER: [], RANK: []}
        self._tried, self._wrong, self._silence = 0, 0, 0.0

    def add(self, case: Case, problems: list[str], running: list[Running]) -> None:
        self._tried += 1
        self._wrong += bool(problems)
        self._silence = max(self._silence, *(command.silent_seconds for command in running))
        if not problems and case.is_refused and case.by in self._seconds:
            times = [command.refused_seconds for command in running]
            self._seconds[case.by] += [seconds for seconds in times if seconds is not None]

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {
            "rim_tried": self._tried, "rim_wrong": self._wrong, "rim_silent_seconds_most": self._silence,
        }  # fmt: skip
        for who, seconds in self._seconds.items():
            if seconds:
                figures[f"refusal_{who}_seconds_most"] = max(seconds)
                figures[f"refusal_{who}_seconds_median"] = statistics.median(seconds)
        return figures


def in_words(problems: list[str], running: list[Running]) -> str:
    """What is wrong with a case, with its commands and the ends of their outputs."""
    lines = ["; ".join(problems)]
    for command in running:
        args, seconds = command.process.args, command.reported_at[-1] - command.start
        lines.append(f"  {shlex.join(map(str, args)) if isinstance(args, tuple) else args}")
        lines.append(f"  ended with {command.process.returncode} after {seconds:.1f} s; the end of its output:")
        lines += [f"    {line}" for line in command.output[-END_CHARACTERS:].splitlines()]
    return "\n".join(lines)
