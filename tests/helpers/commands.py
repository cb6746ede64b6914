"""The commands as users type them, in processes of their own."""

import importlib
import json
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 150.0
"""Longer than anything takes that other processes bring about."""
SLOW_SECONDS = 600
"""What a command may take at most on a slow machine that is busy with other tests."""
PATIENT = "cluster.silence_seconds=60"
"""Where a test is not about silence: a busy machine may leave a rank without a core for long."""
PIPE_BYTES = 1 << 20
"""What a run may print while a test does not read it; a run that cannot print stands still."""
WAIT = re.compile(r"^(?!error: )[^:]+: (still at it|still importing|waiting for rank \d+ .*)$")
SMALL = (
    "model=nano",
    "data.sequence_length=32",
    "budget=3rounds",
    "evaluation.every=1rounds",
    "evaluation.sequences=8",
    "evaluation.final_sequences=8",
    "tracking=none",
    "run.report=false",
)
"""What is trained by default, made small: one trainer; its rounds follow the link, and its batches follow progress."""
FOUR_TRAINERS = (
    "algorithm=diloco",
    "pool.trainers=4",
    "pool.workers_per_trainer=1",
    "algorithm.updates_per_round=4",
    "batching.request=norm_test",
    "batching.every_updates=1",
    "batching.local_batch=2",
)
"""After SMALL: a pool that merges, with short rounds of one length, which repeat to the bit."""
ONE_RANK = ("--nproc-per-node", "1")
"""Where a test is not about several ranks: each takes seconds to import what it needs."""

BROKEN_OUTER_STEP = """
import os
if os.environ.get("RANK") == "{rank}":
    from adloco_dist.pool.trainer import Trainer
    step, steps = Trainer.step, []
    def broken(trainer, *rest):
        steps.append(trainer.id)
        if steps.count({trainer}) == 2:
            raise ArithmeticError("the outer step broke")
        return step(trainer, *rest)
    Trainer.step = broken
"""

SLOW_RANK = """
import os
if os.environ.get("RANK") == "{rank}":
    import time
    from adloco_dist.pool.worker import Worker
    step, ended_at = Worker.step, []
    def slow(worker):
        step(worker)
        if ended_at:
            time.sleep({delay} * (time.thread_time() - ended_at.pop()))
        ended_at.append(time.thread_time())
    Worker.step = slow
"""


def small_without(*starts: str) -> list[str]:
    """SMALL without the settings that begin with one of these: for tests that are about others, or the default."""
    return [setting for setting in SMALL if not setting.startswith(starts)]


def break_outer_step(directory: Path, rank: int, trainer: int) -> str:
    """Let a rank fail in a trainer's second outer step, wherever PYTHONPATH is what this returns."""
    (directory / "sitecustomize.py").write_text(BROKEN_OUTER_STEP.format(rank=rank, trainer=trainer))
    return str(directory)


def documented(page: str, start: str) -> list[str]:
    """The words of the one command in a page's code blocks that begins with `start`, as a shell would read them."""
    blocks = (ROOT / page).read_text(encoding="utf-8").split("```")[1::2]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    (command,) = [line for line in lines if line.startswith(start)]
    return shlex.split(command, comments=True)


def slow_down(directory: Path, rank: int, factor: float) -> str:
    """Let a rank take so many times as long for each update, wherever PYTHONPATH is what this returns."""
    (directory / "sitecustomize.py").write_text(SLOW_RANK.format(rank=rank, delay=factor - 1))
    return str(directory)


@dataclass(frozen=True)
class Finished:
    code: int
    output: str
    """Standard output and standard error together, without what a busy machine adds: what is slow is reported."""


def environment() -> dict[str, str]:
    """This process' own, without what a surrounding torchrun or terminal would change."""
    dropped = (
        "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "COLUMNS", "LINES", "WANDB_API_KEY", "OMP_NUM_THREADS",
    )  # fmt: skip
    return {name: value for name, value in os.environ.items() if name not in dropped}


def train_command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]


def torchrun_command(*arguments: str, torchrun: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, str(ROOT / "launch" / "train.py"), *arguments]


def run(
    command: list[str], cwd: Path, timeout_seconds: float = SLOW_SECONDS, variables: Mapping[str, str] = {}
) -> Finished:
    """Run a command to its end, with these environment variables beside this process' own."""
    done = subprocess.run(
        command, cwd=cwd, env={**environment(), **variables}, text=True, timeout=timeout_seconds, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = done.stdout.splitlines(keepends=True)
    return Finished(done.returncode, "".join(line for line in lines if not WAIT.search(line)))


def run_on_a_terminal(command: list[str], cwd: Path) -> Finished:
    """With what a terminal of 120 columns is sent."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment() | {"COLUMNS": "120"}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the terminal closes with its last process
            break
    os.close(ours)
    return Finished(process.wait(), seen.decode())


@contextmanager
def running(command: list[str], cwd: Path, until: str = "round 2 ") -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A driver, and what it has printed: up to a line that starts with `until`; killed at the end if it still runs."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, pipesize=PIPE_BYTES,
    )  # fmt: skip
    assert process.stdout is not None
    ranks: list[psutil.Process] = []
    try:
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith(until):
                break
        assert process.poll() is None, output
        ranks = psutil.Process(process.pid).children()
        yield process, output
    finally:
        for left in (process, *ranks):
            if left.poll() is None if isinstance(left, subprocess.Popen) else left.is_running():
                left.kill()
        process.communicate()


def wait_until(holds: Callable[[], bool], detail: Callable[[], str]) -> None:
    """Wait for what other processes bring about; fail with some detail where they do not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, detail()
        time.sleep(0.05)  # those processes share this machine's cores with the test


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """The living processes that have `name=value` in their environment."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


@contextmanager
def foreign_program(port: int, answer: bytes | None) -> Iterator[int]:
    """A program that listens on `port` (0: a free one, which is yielded), and answers every caller.

    Args:
        answer: b"": it closes at once; None: it says nothing, and never closes.
    """
    with socket.create_server(("localhost", port)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):  # the server was closed
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if answer is not None:
                        connection.close() if not answer else connection.send(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def facts(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


def tool(name: str, *arguments: str) -> list[str]:
    """The command of another file of launch/."""
    return [sys.executable, str(ROOT / "launch" / name), *arguments]


def use(name: str, *arguments: str, cwd: Path) -> Finished:
    """Run a file of launch/ that shows something in this process, which has imported what takes it seconds."""
    module = re.search(r'run_command\("(.+)"\)', (ROOT / "launch" / name).read_text(encoding="utf-8"))
    assert module
    output, code = StringIO(), 0
    with chdir(cwd), redirect_stdout(output), redirect_stderr(output):
        try:
            importlib.import_module(module[1]).main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    return Finished(code, output.getvalue())


def errors(output: str) -> list[str]:
    """The lines that tell a user what went wrong."""
    return [line for line in output.splitlines() if line.startswith("error: ")]
