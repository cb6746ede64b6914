"""Hosts lost with all their processes and files, taken back, and links cut, over one run after the other."""

import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class HangError(AssertionError):
    """What was waited for did not come."""


class Job:
    """The driver on every host, each in a folder of its own, and what they have printed."""

    def __init__(self, nodes: Sequence[Host], folder: Path, *settings: str) -> None:
        self.nodes, self.folder = nodes, folder
        self.settings = (*SETTINGS, *settings)
        self.processes: dict[str, subprocess.Popen[str]] = {}

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

    def newest_round(self) -> int:
        rounds = [int(match[1]) for line in self.lines() if (match := re.match(r"round (\d+) ", line))]
        return max(rounds, default=0)

    def wait_for(self, what: str, holds: Callable[[], bool]) -> float:
        """Seconds until it does."""
        start = time.monotonic()
        while not holds():
            if time.monotonic() - start > PATIENCE_SECONDS:
                raise HangError(f"{what}: not within {PATIENCE_SECONDS:.0f} s\n" + "\n".join(self.lines()[-40:]))
            time.sleep(POLL_SECONDS)
        return time.monotonic() - start

    def wait_for_rounds(self, more: int) -> None:
        goal = self.newest_round() + more
        self.wait_for(f"round {goal}", lambda: self.newest_round() >= goal)

    def time_to_train_again(self, change: Callable[[], object]) -> tuple[float, int]:
        """Seconds from `change` to the first round after the restart that it brings, and the rounds that were lost."""
        restarts, rounds_before = self.count("note: resumes from"), self.newest_round()
        change()
        seconds = self.wait_for("a restart", lambda: self.count("note: resumes from") > restarts)
        seconds += self.wait_for("a round", lambda: self._rounds_since_restart() != [])
        return seconds, rounds_before - (self._rounds_since_restart()[0] - 1)

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

    def _rounds_since_restart(self) -> list[int]:
        """On the host whose rank 0 has restarted last."""
        newest = max((host for host in self.nodes if self.output(host).exists()), key=self._restarted_at)
        lines = self.output(newest).read_text().splitlines()
        last = max(place for place, line in enumerate(lines) if line.startswith("note: resumes from"))
        return [int(match[1]) for line in lines[last:] if (match := re.match(r"round (\d+) ", line))]

    def _restarted_at(self, host: Host) -> str:
        return max((start["started"] for start in _facts(self.folder / host.name).get("resumed", [])), default="")


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


def lose_hosts() -> dict[str, float]:
    """A host lost three times and taken back, the host of the rendezvous lost once."""
    seconds, rounds_lost = [], []
    with job() as running:
        first, second, third = running.nodes
        for victim in (third, second, third):
            taken, lost = running.time_to_train_again(lambda victim=victim: running.lose(victim))
            print(f"{victim.name} lost: training again after {taken:.1f} s, {lost} rounds lost", flush=True)
            seconds.append(taken)
            rounds_lost.append(lost)
            running.wait_for_rounds(2)
            victim.mend()
            taken, _ = running.time_to_train_again(lambda victim=victim: running.start(victim))
            print(f"{victim.name} taken back after {taken:.1f} s", flush=True)
            running.wait_for_rounds(2)
        running.lose(first)
        left = [running.processes[host.name] for host in (second, third)]
        ended = running.wait_for("the agents' end", lambda: all(process.poll() is not None for process in left))
        print(f"host of the rendezvous lost: all agents ended after {ended:.1f} s", flush=True)
        first.mend()
        taken, _ = running.time_to_train_again(lambda: [running.start(host) for host in running.nodes])
        print(f"started again: training after {taken:.1f} s", flush=True)
        running.wait_for_rounds(2)
    return {
        "node_loss_seconds": statistics.median(seconds),
        "node_loss_seconds_most": max(seconds),
        "node_rounds_lost": max(rounds_lost),
        "rendezvous_loss_end_seconds": ended,
    }


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
