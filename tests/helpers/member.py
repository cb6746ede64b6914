"""A member of a run in a loop of its own, as a program: python member.py MEET SEED SILENCE_SECONDS.

It trains until it is ended, and prints a line of JSON after every round.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import Popen

import torch
import torch.nn.functional as F
from torch import nn

from adloco_dist import DiLoCo, Members
from helpers.hosts import Host

UPDATES = 10
"""Of a round."""
WIDTH = 256
PORT = 29400
SILENCE_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


def main(meet: str, seed: int, silence_seconds: float) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    members = Members(meet, silence_seconds=silence_seconds)
    with DiLoCo(module, optimizer, UPDATES, members=members) as diloco:
        while True:
            content = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
            size = len(members.group.ranks) if members.group else 1
            told = Round(diloco.round, size, hashlib.sha256(content).hexdigest(), time.time())
            print(json.dumps(asdict(told)), flush=True)
            before = diloco.round
            while diloco.round == before:
                inputs = torch.randn(64, WIDTH)
                F.mse_loss(module(inputs), inputs.roll(1, 1)).backward()
                optimizer.step()
                optimizer.zero_grad()


@dataclass(frozen=True)
class Round:
    """The end of a round, as a member has told it."""

    number: int
    members: int
    weights: str
    """Their digest."""
    at: float
    """When, in seconds of the clock."""


@dataclass
class OnHosts:
    """Members on some hosts, one on each, and what they have told."""

    hosts: Sequence[Host]
    folder: Path
    processes: "dict[str, Popen[str]]" = field(default_factory=dict[str, "Popen[str]"])
    _starts: int = 0

    def start(self, host: Host) -> None:
        """Start a member on a host."""
        self._starts += 1
        meet = ",".join(f"{one.address}:{PORT}" for one in self.hosts)
        arguments = [sys.executable, __file__, meet, str(self._starts), str(SILENCE_SECONDS)]
        if host.name in self.processes:  # it may have ended already
            self.processes[host.name].wait()
        environment = f"PYTHONPATH={ROOT / 'src'}:{ROOT / 'tests'}"
        with self._file(host).open("w") as output:
            self.processes[host.name] = host.start(["env", environment, *arguments], output)

    def kill(self, host: Host) -> None:
        """Kill the member on a host."""
        os.killpg(self.processes[host.name].pid, signal.SIGKILL)
        self.processes[host.name].wait()

    def rounds(self, host: Host) -> list[Round]:
        """What the member that was started last on a host has told."""
        lines = self._file(host).read_text().split("\n")[:-1]
        return [Round(**json.loads(line)) for line in lines if line.startswith("{")]

    def wait(self, host: Host, members: int, after: float = 0.0) -> Round:
        """Wait until a host averages with so many, at the end of a round after a time."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            for one in self.rounds(host):
                if one.members == members and one.at > after:
                    return one
            time.sleep(0.02)
        told = "\n".join(f"{one.name}:\n{self._file(one).read_text()[-1500:]}" for one in self.hosts)
        raise AssertionError(f"{host.name} does not average with {members}:\n{told}")

    def differing(self, hosts: Sequence[Host], after: float = 0.0) -> list[int]:
        """The rounds that have ended after a time and after which these do not have the same weights, though they
        averaged with as many."""
        found: dict[tuple[int, int], set[str]] = {}
        for host in hosts:
            for one in (one for one in self.rounds(host) if one.at > after):
                found.setdefault((one.number, one.members), set()).add(one.weights)
        return [number for (number, members), weights in found.items() if len(weights) > 1 and members > 1]

    def _file(self, host: Host) -> Path:
        return self.folder / f"{host.name}.log"


@contextmanager
def on_hosts(hosts: Sequence[Host], folder: Path) -> Iterator[OnHosts]:
    """A member on each of these hosts; all are there, and average."""
    started = OnHosts(hosts, folder)
    try:
        for host in hosts:
            started.start(host)
        for host in hosts:
            started.wait(host, len(hosts))
        yield started
    finally:
        for host in hosts:
            started.kill(host)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
