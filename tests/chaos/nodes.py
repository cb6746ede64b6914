"""Hosts lost with all their processes and files, taken back, and links cut, over one run after the other."""

import json
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from helpers.commands import train_command
from helpers.hosts import Host, hosts

PORT = 29517
EVERY_ROUNDS = 1
REPORTED = ("evaluation.every=1rounds", "evaluation.sequences=8")
"""What is evaluated is printed, and what is printed says how far a job is."""
SETTINGS = (
    "model=nano", "algorithm=diloco", "pool.trainers=2", "pool.workers_per_trainer=3", "data.sequence_length=64",
    "batching.request=none", "merge=none", "algorithm.updates_per_round=20", "budget=100000rounds",
    "inner.schedule=constant", *REPORTED, "evaluation.final_sequences=16", "tracking=none", "run.report=false",
    "cluster.threads_per_rank=1", "run.directory=run", "run.unfinished=resume",
    f"checkpoint.every={EVERY_ROUNDS}rounds",
)  # fmt: skip
PATIENCE_SECONDS = 180.0
CUT_SECONDS = (5, 10, 15, 20, 30, 40)
RETURN_SECONDS = 60.0
"""After a link is mended, within which all hosts train together again."""
POLL_SECONDS = 0.05
PAUSE_SECONDS = 5.0
"""The most that ranks stop for a newcomer before a line says that it is there."""


class HangError(AssertionError):
    """What was waited for did not come."""


class Job:
    """The driver on every host, each in a folder of its own, and what they have printed."""

    def __init__(self, nodes: Sequence[Host], folder: Path, *settings: str) -> None:
        self.nodes, self.folder = nodes, folder
        self.settings = (*SETTINGS, *settings)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._said: dict[str, int] = {}

    def start(self, host: Host) -> None:
        (self.folder / host.name).mkdir(exist_ok=True)
        options = ("--nnodes", f"1:{len(self.nodes)}", "--nproc-per-node", "1", "--max-restarts", "200")
        place = ("--rdzv-endpoint", f"{self.nodes[0].name}:{PORT}", "--local-addr", host.address)
        command = train_command(*options, *place, *self.settings)
        with self.output(host).open("a") as output:
            self.processes[host.name] = host.start(command, output, cwd=self.folder / host.name)

    def output(self, host: Host) -> Path:
        return self.folder / host.name / "output"

    def lose(self, host: Host) -> None:
        """With all processes and files."""
        host.lose()
        self.processes.pop(host.name).wait()
        shutil.rmtree(self.folder / host.name / "run", ignore_errors=True)

    def lines(self) -> list[str]:
        """What all drivers have printed so far, host by host."""
        outputs = [self.output(host) for host in self.nodes if self.output(host).exists()]
        return [line for output in outputs for line in output.read_text().splitlines()]

    def count(self, pattern: str) -> int:
        return len([line for line in self.lines() if re.match(pattern, line)])

    def tails(self) -> str:
        """The last that each host has said, and its last round."""
        said = []
        for host in self.nodes:
            lines = self.output(host).read_text().splitlines() if self.output(host).exists() else []
            rounds = [line for line in lines if line.startswith("round ")]
            others = [line for line in lines if not line.startswith(("round ", "note: ", "Llama"))]
            said.append("\n".join([f"{host.name}:", *others[-6:], *rounds[-1:]]))
        return "\n".join(said)

    def has_said_more(self, pattern: str) -> bool:
        """Whether a line that begins so was printed again since this was last true."""
        count = self.count(pattern)
        is_more, self._said[pattern] = count > self._said.get(pattern, 0), count
        return is_more

    def newest_round(self) -> int:
        rounds = [int(match[1]) for line in self.lines() if (match := re.match(r"round (\d+) ", line))]
        return max(rounds, default=0)

    def wait_for(self, what: str, holds: Callable[[], bool]) -> float:
        """Seconds until it does."""
        start = time.monotonic()
        while not holds():
            if time.monotonic() - start > PATIENCE_SECONDS:
                raise HangError(f"{what}: not within {PATIENCE_SECONDS:.0f} s\n{self.tails()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - start

    def wait_for_rounds(self, more: int) -> None:
        goal = self.newest_round() + more
        self.wait_for(f"round {goal}", lambda: self.newest_round() >= goal)

    def wait_for_all(self) -> float:
        """Seconds until all hosts train together: a round of a start with ranks on each is reported."""
        outputs = map(self.output, self.nodes)
        printed = [output.stat().st_size if output.exists() else 0 for output in outputs]
        return self.wait_for("a round of all hosts", lambda: self._all_train(printed))

    def _all_train(self, since: Sequence[int]) -> bool:
        for host, begin in zip(self.nodes, since, strict=True):
            output, folder = self.output(host), self.folder / host.name
            text = output.read_bytes()[begin:].decode() if output.exists() else ""
            starts = _facts(folder).get("resumed", [])
            world_size = int(starts[-1]["world_size"]) if starts else len(self.nodes)
            detail = text.rpartition("note: resumes from")[2]
            if world_size == len(self.nodes) and re.search(r"^round [1-9]", detail, re.MULTILINE):
                return True
        return False

    def first(self) -> Host:
        """The host whose rank 0 keeps the records."""
        return max((host for host in self.nodes if host.name in self.processes), key=self._restarted_at)

    def _restarted_at(self, host: Host) -> str:
        facts = _facts(self.folder / host.name)
        return max((start["started"] for start in facts.get("resumed", [])), default=str(facts.get("started", "")))


class Pace(threading.Thread):
    """Watches when rounds of a job end, while the block runs."""

    def __init__(self, running: Job) -> None:
        super().__init__(daemon=True)
        self._running, self._is_over = running, threading.Event()
        self.ends: list[tuple[float, int]] = []
        """When the newest round was another one, and which."""

    def run(self) -> None:
        while not self._is_over.wait(POLL_SECONDS / 2):
            newest = self._running.newest_round()
            if not self.ends or newest > self.ends[-1][1]:
                self.ends.append((time.monotonic(), newest))

    def __enter__(self) -> "Pace":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.join()

    def usual(self, before: float) -> float:
        """The median seconds of the ten rounds before a time."""
        ends = [end for end, _ in self.ends if end <= before][-11:]
        return statistics.median(later - earlier for earlier, later in pairwise(ends))

    def longest(self, since: float) -> float:
        """The longest seconds from the end of a round to that of the next one, of those that ended since a time."""
        ends = [end for end, _ in self.ends]
        return max(later - earlier for earlier, later in pairwise(ends) if later > since)

    def next_after(self, since: float) -> float:
        """When the first round ended after a time."""
        self._running.wait_for("a round", lambda: self.ends[-1][0] > since)
        return next(end for end, _ in self.ends if end > since)


def _facts(folder: Path) -> dict[str, list[dict[str, str]]]:
    path = folder / "run" / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


@contextmanager
def job(*settings: str) -> Iterator[Job]:
    """On three hosts, which train together by now."""
    with tempfile.TemporaryDirectory() as folder, hosts(3) as nodes:
        running = Job(nodes, Path(folder), *settings)
        for host in nodes:
            running.start(host)
        running.wait_for_rounds(3)
        yield running


EVENTS = ("leave_seconds", "first_node_lost_seconds", "leave_silent_seconds")
"""By figure: the processes of a host end, or those of the first in the roll, or a host is lost without a sign."""


def lose_hosts(count: int) -> dict[str, float]:
    """Hosts lost and taken back, `count` of each kind in turn: the median seconds to the end of the next round of the
    rest, less a usual one; what a newcomer costs the rest; and the rounds that were lost."""
    taken: dict[str, list[float]] = {name: [] for name in (*EVENTS, "join_seconds")}
    rounds_lost = 0
    with job() as running, Pace(running) as pace:
        for event in EVENTS * count:
            running.wait_for_rounds(12)
            first = running.first()
            lost = first if event == "first_node_lost_seconds" else next(h for h in running.nodes if h is not first)
            start, before = time.monotonic(), running.newest_round()
            if event == "leave_silent_seconds":
                running.lose(lost)
            else:
                lost.end()
                running.processes.pop(lost.name).wait()
            said = f".*{lost.name} lost;"
            running.wait_for(said, lambda said=said: running.has_said_more(said))
            met = time.monotonic()
            end, usual = pace.next_after(met), pace.usual(start)
            rounds_lost = max(rounds_lost, before - running.newest_round())
            taken[event].append(end - start - usual)
            print(f"{event}: met after {met - start:.2f} s, {taken[event][-1]:.2f} s beside {usual:.2f} s", flush=True)
            lost.mend()
            said = f".*{lost.name} new;"
            running.start(lost)
            running.wait_for(said, lambda said=said: running.has_said_more(said))
            joined = time.monotonic()
            pace.next_after(joined)
            taken["join_seconds"].append(pace.longest(joined - PAUSE_SECONDS) - usual)
            print(f"join_seconds: {taken['join_seconds'][-1]:.2f} s", flush=True)
    figures = {name: statistics.median(values) for name, values in taken.items()}
    most = {f"{name}_most": max(values) for name, values in taken.items()}
    return {**figures, **most, "node_rounds_lost": rounds_lost}


def cut_links(count: int) -> dict[str, float]:
    """One host's link after the other dead for 5 to 40 s while they train; all three must train together again."""
    taken = []
    with job() as running:
        for number in range(count):
            host, seconds = running.nodes[(number + 1) % 3], CUT_SECONDS[number % len(CUT_SECONDS)]
            host.cut()
            time.sleep(seconds)  # the length of the cut is what is tried
            host.mend()
            try:
                taken.append(running.wait_for_all())
            except HangError as error:
                print(f"cut {number + 1}: {host.name} for {seconds} s: {error}", flush=True)
                for one in running.nodes:
                    if running.processes[one.name].poll() is not None:
                        running.start(one)
                running.wait_for_all()
                taken.append(float("inf"))
            print(f"cut {number + 1}: {host.name} for {seconds} s, all train after {taken[-1]:.1f} s", flush=True)
    returned = [seconds for seconds in taken if seconds <= RETURN_SECONDS]
    return {
        "links_cut": count,
        "links_cut_returned": len(returned),
        "links_cut_return_seconds": statistics.median(taken),
        "links_cut_return_seconds_most": max(taken),
    }
