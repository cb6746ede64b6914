"""Whole runs as users start them: the commands of launch/, a small model, and text that is made on the spot."""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness import Here
from helpers.commands import FOUR_TRAINERS, SMALL, Finished, errors, run, running, train_command

MAX_SECONDS = 60.0
"""For the other ranks to end."""
ENDLESS = ("budget=100000rounds",)
WORDS = [
    "the",
    "pool",
    "of",
    "trainers",
    "averages",
    "what",
    "its",
    "workers",
    "have",
    "learnt",
    "from",
    "their",
    "part",
    "of",
    "the",
    "corpus",
]


def write_corpus(folder: Path) -> Path:
    """Text in which every word follows from the one before."""
    path = folder / "corpus.txt"
    lines = [" ".join(WORDS[(start + step) % len(WORDS)] for step in range(12)) for start in range(3000)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def small_run(here: Here, directory: str, *more: str, num_ranks: int = 1) -> list[str]:
    """The command of a run of three rounds, in fp32, on ranks that share the device."""
    data = ("data=text", f"data.train=[{write_corpus(here.folder)}]", "precision=fp32")
    place = (f"cluster.device={here.device.type}", f"run.directory={directory}", "evaluation.every=1rounds")
    return train_command("--nproc-per-node", str(num_ranks), *SMALL, *FOUR_TRAINERS, *data, *place, *more)


def finish(command: list[str], here: Here, timeout_seconds: float = 120) -> Finished:
    """Run a command to its end.

    Raises:
        AssertionError: it failed; with what it printed.
    """
    done = run(command, here.folder, timeout_seconds)
    print(done.output, flush=True)
    assert done.code == 0, f"{Path(command[1]).name} ended with code {done.code}: {errors(done.output)}"
    return done


def _is_running(process: psutil.Process) -> bool:
    """False also of one that has ended, and of which its parent has not heard yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Hurt:
    """What a run did when one of its ranks was hurt."""

    code: int
    """Of the command."""
    seconds: float
    """Until its other ranks had ended, or it reported that it resumes."""
    output: str


def hurt_rank(
    command: list[str], here: Here, rank: int, by: signal.Signals, until: str | None = None, minimum: str = "round 2 "
) -> Hurt:
    """Send a signal to a rank once a run is under way.

    Args:
        until: the beginning of a line after which the run is asked to stop; None: it ends by itself.
        minimum: the beginning of the line after which the rank is hurt.
    """
    with running(command, here.folder, minimum) as (process, output):
        ranks = {child.environ().get("RANK"): child for child in psutil.Process(process.pid).children()}
        ranks[str(rank)].send_signal(by)
        start = time.monotonic()
        assert process.stdout is not None
        if until is None:
            others = [child for name, child in ranks.items() if name != str(rank)]
            while any(map(_is_running, others)) and time.monotonic() < start + MAX_SECONDS:
                time.sleep(0.05)
            seconds = time.monotonic() - start
            with suppress(psutil.NoSuchProcess):  # the agent would wait long for one that was stopped
                ranks[str(rank)].kill()
        else:
            for line in process.stdout:
                output += line
                if line.startswith(until):
                    break
            seconds = time.monotonic() - start
            process.send_signal(signal.SIGTERM)
        output += process.communicate(timeout=60)[0]
        print(output, flush=True)
        return Hurt(process.returncode, seconds, output)
