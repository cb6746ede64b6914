"""Hosts lost with all their processes and files, taken back, and links cut, over one run after the other."""

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from adloco_dist.testing.hosts import Host, hosts, why_unavailable

ROOT = Path(__file__).resolve().parent.parent
PORT = 29517
EVERY_ROUNDS = 1
SETTINGS = (
    "model=nano", "pool.trainers=2", "pool.workers_per_trainer=3", "data.sequence_length=64", "batching.request=none",
    "merge=none", "algorithm.updates_per_round=20", "budget=rounds", "budget.rounds=100000", "inner.schedule=constant",
    "evaluation=final_only", "evaluation.final_sequences=16", "tracking=none", "cluster.threads_per_rank=1",
    "run.directory=run", "run.unfinished=resume", f"checkpoint.every_rounds={EVERY_ROUNDS}",
)  # fmt: skip
PATIENCE_SECONDS = 180.0
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
        options = ("--nnodes", f"1:{len(self.nodes)}", "--nproc-per-node", "1", "--max-restarts", "20")
        place = ("--rdzv-endpoint", f"{self.nodes[0].name}:{PORT}", "--local-addr", host.address)
        command = [sys.executable, str(ROOT / "launch" / "train.py"), *options, *place, *self.settings]
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
        restarts, rounds_before = self.count("note: goes on from"), self.newest_round()
        change()
        seconds = self.wait_for("a restart", lambda: self.count("note: goes on from") > restarts)
        seconds += self.wait_for("a round", lambda: self._rounds_since_restart() != [])
        return seconds, rounds_before - (self._rounds_since_restart()[0] - 1)

    def _rounds_since_restart(self) -> list[int]:
        """On the host whose rank 0 has restarted last."""
        newest = max((host for host in self.nodes if self.output(host).exists()), key=self._restarted_at)
        lines = self.output(newest).read_text().splitlines()
        last = max(place for place, line in enumerate(lines) if line.startswith("note: goes on from"))
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


def cut_link(seconds: float) -> dict[str, float]:
    """A host's link dead for a while in the middle of training, without an end to any process."""
    with job() as running:
        rounds = running.newest_round()
        running.nodes[2].cut()
        time.sleep(seconds)  # the length of the cut is what is tried
        running.nodes[2].mend()
        restarts = running.count("note: goes on from")
        taken = running.wait_for("rounds after the cut", lambda: running.newest_round() >= rounds + 3)
        told = "survived" if not restarts else "ended and resumed"
        print(f"link cut for {seconds:.0f} s: {told}, 3 rounds further {taken:.1f} s after it was mended", flush=True)
        back = (
            running.wait_for("the host's return", lambda: running.count(".*are hosted on 3") > 0) if restarts else 0.0
        )
        running.wait_for_rounds(3)
        print(f"training with the host that was cut off {taken + back:.1f} s after the link was mended", flush=True)
    return {"link_cut_seconds_to_train": taken, "link_cut_seconds_to_full": taken + back}


def measure_nodes() -> dict[str, float]:
    """All of it; nothing where hosts cannot be made."""
    if reason := why_unavailable():
        print(f"node loss: not measured, {reason}")
        return {}
    return {**lose_hosts(), **cut_link(20.0)}
