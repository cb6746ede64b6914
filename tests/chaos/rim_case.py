"""What a clumsy or unlucky user does, as data: a command, what befalls it, and how it must end."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from helpers.commands import tool

HERE, PORT = "{here}", "{port}"
"""In the words of a command: the case's folder, and a port that is free when the case begins."""
DRIVER, RANK, TOOL, NOBODY = "driver", "rank", "tool", "nobody"
"""Who refuses. Of the driver and of ranks the time until they do is measured."""
PROCESS, GROUP, TREE = "the process", "its group", "the process and all that it has started"
HANG_UP = "hang up"
"""The terminal is closed."""
CORPUS = "corpus.txt"
"""Is there in every case."""
SMALL = (
    "--nproc-per-node", "2", "model=nano", "data=text", f"data.train=[{CORPUS}]", "data.sequence_length=32",
    "algorithm=diloco", "batching.request=norm_test",
    "pool.trainers=2", "pool.workers_per_trainer=1", "merge.every_rounds=2",
    "algorithm.updates_per_round=2", "batching.local_batch=2", "batching.max_batch=8", "batching.capacity=64",
    "budget=8rounds", "evaluation.sequences=8", "evaluation.final_sequences=8",
    "checkpoint.every=1rounds", "tracking=none", "run.report=false", "cluster.device=cpu",
)  # fmt: skip
"""Ten seconds of training, most of them the start; what comes later on a command line counts."""
ENDLESS = ("budget=1000000rounds", "evaluation.every=1rounds", "run.directory=new")
"""Rounds that are evaluated are reported, each of them."""
MODEL = "new/model/model.safetensors"
ENDED, REFUSED, FAILED, STOPPED = 0, 2, 1, 75

Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Act:
    """What is done to a command while it runs."""

    what: Signals | str
    after: float | str
    """Seconds after the act before, or the start; or what it must have printed first."""
    whom: str = PROCESS
    later_seconds: float = 0.0
    """After that moment."""


@dataclass(frozen=True)
class Case:
    """A command, what befalls it, and how it must end."""

    name: str
    words: tuple[str, ...]
    """As typed in a folder of its own, in which there is a corpus."""
    detail: tuple[str, ...] = ()
    """Words that are owed."""
    unreported: tuple[str, ...] = ()
    """Words that would be wrong."""
    codes: tuple[int, ...] = (REFUSED,)
    by: str = NOBODY
    has_run: bool = False
    """There is a finished run as well, in run/."""
    prepare: tuple[Prepare, ...] = ()
    """What else is done to the folder before."""
    environment: Mapping[str, str] = field(default_factory=dict)
    redirection: str = ""
    """As a shell reads it after the command."""
    is_terminal: bool = False
    """It has a terminal of its own instead of a pipe."""
    acts: tuple[Act, ...] = ()
    beside: Callable[[int], AbstractContextManager[Any]] | None = None
    """A foreign program on the port."""
    second: tuple[str, ...] = ()
    """The command of another node, which runs in second/ at the same time. The same is owed there."""
    leaves: tuple[str, ...] = ()
    """Patterns of files that must be there in the end. (A refusal must leave the folder as it was.)"""
    silence_seconds: float = 15.0
    """Without a word, at most."""
    limit_seconds: float = 120.0

    @property
    def is_refused(self) -> bool:
        return set(self.codes) == {REFUSED}


def train(*arguments: str) -> tuple[str, ...]:
    """A small run of two trainers on two ranks."""
    return bare("train.py", *SMALL, *arguments)


def bare(script: str, *arguments: str) -> tuple[str, ...]:
    """A command of launch/ with nothing but `arguments`."""
    return tuple(tool(script, *arguments))


def refused(name: str, words: tuple[str, ...], *detail: str, by: str = DRIVER, **more: Any) -> Case:
    """A command that ends with 2 and one line, and leaves nothing behind."""
    return Case(name, words, detail, by=by, **more)


def done(name: str, words: tuple[str, ...], *detail: str, **more: Any) -> Case:
    """A command that does what was asked."""
    return Case(name, words, detail, codes=(ENDED,), **more)


def stopped(name: str, words: tuple[str, ...], *detail: str, **more: Any) -> Case:
    """A command that was asked to stop, and does."""
    return Case(name, words, detail, codes=(STOPPED,), **more)


# --- preparations


def write(name: str, content: bytes | str) -> Prepare:
    """A file of the folder."""
    raw = content.encode() if isinstance(content, str) else content

    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)

    return prepare


def make(name: str) -> Prepare:
    """An empty folder."""
    return lambda folder: (folder / name).mkdir(parents=True)


def rename(old: str, new: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / old).rename(folder / new)

    return prepare
