"""Four hosts of a run, to any of which anything may happen at any time: they are lost, cut off, paused, and return."""

import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from adloco_dist.config import EXIT_STOPPED
from chaos.nodes import PATIENCE_SECONDS, POLL_SECONDS, HangError, Job
from helpers.hosts import Host, hosts

HOSTS, ROUNDS_PER_EVENT = 4, 12
SETTINGS = (
    "algorithm.round=updates", "algorithm.updates_per_round=20", "pool.trainers=1", "pool.workers_per_trainer=null",
    "checkpoint.every=20rounds",
)  # fmt: skip
EVENTS = ("kill", "lose", "cut", "pause", "end", "leave")
SECONDS = (1, 12)
"""Between two events, and as long a host is cut off or paused at least; at most three times as long."""


class Churn(Job):
    """A job to whose hosts things happen, one after the other."""

    def __init__(self, nodes: Sequence[Host], folder: Path, seed: int, *settings: str) -> None:
        folder.mkdir(parents=True)
        super().__init__(nodes, folder, *SETTINGS, *settings)
        self.random = random.Random(seed)
        self._moved_at = time.monotonic()
        self.wrong: list[str] = []
        self.due: list[tuple[float, Host, str]] = []
        """When what happened to a host ends, and what does so."""

    def ranks(self, host: Host) -> list[str]:
        """The process ids of a host's ranks."""
        found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False).stdout
        return [pid for pid in found.split() if b"adloco_dist.launch\0" in _command(pid)]

    def signal(self, host: Host, number: signal.Signals) -> None:
        subprocess.run(["kill", f"-{number.value}", *self.ranks(host)], check=False, capture_output=True)

    def happen(self) -> str:
        """Let something happen to a host that nothing has happened to; in words."""
        troubled = {host.name for _, host, _ in self.due}
        host = self.random.choice([host for host in self.nodes if host.name not in troubled])
        event, seconds = self.random.choice(EVENTS), self.random.uniform(*SECONDS) * self.random.choice((1, 3))
        match event:
            case "kill":  # its driver starts it again
                self.signal(host, signal.SIGKILL)
                return f"{host.name}: ranks killed"
            case "lose" | "end":
                (host.lose if event == "lose" else host.end)()
                self.processes.pop(host.name).wait()
            case "leave":
                driver = self.processes.pop(host.name)
                driver.send_signal(signal.SIGTERM)
                if (code := driver.wait(PATIENCE_SECONDS)) != EXIT_STOPPED:
                    self.wrong.append(f"{host.name} left with {code}")
            case "cut":
                host.cut()
            case _:
                self.signal(host, signal.SIGSTOP)
        self.due.append((time.monotonic() + seconds, host, event))
        return f"{host.name}: {event} for {seconds:.0f} s"

    def has_ended(self) -> bool:
        """Whether the run has, on some host."""
        return self.count("ended: ") > 0

    def stands_at(self, rounds: int) -> bool:
        """Whether no round has ended since."""
        if time.monotonic() - self._moved_at > PATIENCE_SECONDS:
            raise HangError(f"round {rounds}\n{self.tails()}")
        has_moved = self.newest_round() > rounds or self.has_ended()
        self._moved_at = time.monotonic() if has_moved else self._moved_at
        return not has_moved

    def wrong_ends(self) -> list[str]:
        """Wait until the run has ended, and all that happened; how hosts have ended that should have ended well."""
        wrong = self.wrong
        while not self.has_ended() or self.due:
            self.end_due()
            rounds = self.newest_round()
            time.sleep(1.0)
            self.stands_at(rounds)
        for host in self.nodes:
            try:
                code = self.processes[host.name].wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                raise HangError(f"{host.name} does not end\n{self.tails()}") from None
            if code:
                wrong.append(f"{host.name} ended with {code}: {self.output(host).read_text().splitlines()[-3:]}")
        return wrong

    def results(self) -> list[Path]:
        """run.json of the hosts that have one with a result."""
        files = self.folder.glob("*/run/run.json")
        return [file for file in files if json.loads(file.read_text())["result"]]

    def final_loss(self) -> float:
        (file,) = self.results()
        return min(one["validation_loss"] for one in json.loads(file.read_text())["result"]["candidates"])

    def rounds(self) -> list[int]:
        """The rounds of the records with the result."""
        (file,) = self.results()
        return [json.loads(line)["round"] for line in (file.parent / "metrics.jsonl").read_text().splitlines()]

    def end_due(self) -> None:
        """End what has lasted long enough."""
        now = time.monotonic()
        for due, host, event in [each for each in self.due if each[0] <= now]:
            self.due.remove((due, host, event))
            match event:
                case "lose" | "end" | "leave":
                    host.mend()
                    self.start(host)
                case "cut":
                    host.mend()
                case _:
                    self.signal(host, signal.SIGCONT)


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def measure_churn(events: int, seed: int, *settings: str) -> dict[str, float]:
    """A run to whose hosts so many things happen, and that ends by its budget, beside one to which nothing happens: how
    many of its ends, rounds and losses are wrong."""
    budget = f"budget={ROUNDS_PER_EVENT * events}rounds"
    with tempfile.TemporaryDirectory() as folder, hosts(HOSTS) as nodes:
        disturbed = Churn(nodes, Path(folder) / "disturbed", seed, budget, *settings)
        for host in nodes:
            disturbed.start(host)
        disturbed.wait_for_rounds(3)
        happened = 0
        while happened < events and not disturbed.has_ended():
            print(f"{happened + 1}: round {disturbed.newest_round()}, {disturbed.happen()}", flush=True)
            happened += 1
            until, rounds = time.monotonic() + disturbed.random.uniform(*SECONDS), disturbed.newest_round()
            # Of four hosts three are there soon, and a round ends before the next event.
            while time.monotonic() < until or len(disturbed.due) > 1 or disturbed.stands_at(rounds):
                disturbed.end_due()
                time.sleep(POLL_SECONDS)
        wrong = disturbed.wrong_ends()
        quiet = Churn(nodes, Path(folder) / "quiet", seed, budget, *settings)
        for host in nodes:
            quiet.start(host)
        wrong += quiet.wrong_ends()
        losses = [job.final_loss() for job in (disturbed, quiet)]
        rounds = disturbed.rounds()
        print(f"losses: {losses[0]:.4f}, undisturbed {losses[1]:.4f}; rounds recorded: {len(set(rounds))}", flush=True)
        wrong += [f"round {number} twice" for number in sorted({n for n in rounds if rounds.count(n) > 1})]
        if not abs(losses[0] - losses[1]) <= 0.03 * losses[1]:
            wrong.append(f"losses {losses}")
        for line in wrong:
            print(f"wrong: {line}", flush=True)
    return {"churn_events": happened, "churn_wrong": len(wrong), "churn_loss": losses[0] / losses[1]}
