"""Hosts that are lost with all they hold, and come back, under the commands of docs/reliability.md."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT, documented

from adloco_dist.testing.hosts import Host, hosts, why_unavailable

SETTINGS = (
    "model=nano", "pool.trainers=2", "pool.workers_per_trainer=2", "batching.request=none", "merge=none",
    "data.sequence_length=32", "algorithm.updates_per_round=10", "budget=rounds", "budget.rounds=100000",
    "evaluation=final_only", "tracking=none", "cluster.threads_per_rank=1", "checkpoint.every_rounds=1",
    "checkpoint.every_minutes=null",
)  # fmt: skip
PATIENCE_SECONDS = 150.0

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


def command(first: Host, host: Host) -> list[str]:
    """The driver of docs/reliability.md on one of two hosts, one rank on each."""
    ours = {
        "python": [sys.executable],
        "launch/train.py": [str(ROOT / "launch" / "train.py")],
        "2:3": ["1:2", "--nproc-per-node", "1", "--local-addr", host.address],
        "node1:29500": [f"{first.name}:29514"],
        "...": [],
    }
    start = "python launch/train.py --nnodes 2:3"
    return [word for theirs in documented("docs/reliability.md", start) for word in ours.get(theirs, [theirs])]


def wait_until(holds: Callable[[], bool], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)  # the two hosts share this machine's cores with the test


def test_a_lost_host_costs_a_checkpoint_interval_and_is_taken_back(tmp_path: Path) -> None:
    with hosts(2) as (first, second):
        outputs = {host: tmp_path / host.name / "output" for host in (first, second)}
        drivers: dict[Host, subprocess.Popen[str]] = {}

        def start(host: Host) -> None:
            outputs[host].parent.mkdir(exist_ok=True)
            with outputs[host].open("a") as output:
                drivers[host] = host.start([*command(first, host), *SETTINGS], output, cwd=outputs[host].parent)

        def everything() -> str:
            return "\n".join(output.read_text() for output in outputs.values() if output.exists())

        def newest_round() -> int:
            told = [line for line in everything().splitlines() if line.startswith("round ")]
            return max((int(line.split()[1]) for line in told), default=0)

        def wait_for_rounds(more: int) -> None:
            goal = newest_round() + more
            wait_until(lambda: newest_round() >= goal, everything)

        for host in (first, second):
            start(host)
        wait_until(lambda: newest_round() >= 3, everything)
        before = newest_round()
        second.lose()
        drivers[second].wait()
        shutil.rmtree(outputs[second].parent / "runs")
        wait_until(lambda: "workers of 2 ranks are hosted on 1" in everything(), everything)
        resumed_from = int(everything().partition("goes on from ")[2].split()[0].rpartition("-")[2].strip(";,"))
        assert before - resumed_from <= 2, "the round that was being checkpointed, and the one after"
        wait_for_rounds(2)
        second.mend()
        start(second)
        wait_until(lambda: "workers of 1 ranks are hosted on 2" in everything(), everything)
        wait_for_rounds(2)
        for host in (first, second):
            subprocess.run(host.command(["kill", "-INT", str(drivers[host].pid)]), check=False)
        assert [driver.wait(timeout=60) for driver in drivers.values()] == [75, 75], everything()
    assert "Traceback" not in everything()


WATCHED = "import sys, threading; from adloco_dist.launch.contact import watch_rendezvous"
WATCHED += "; from adloco_dist.launch.rendezvous import Rendezvous"
WATCHED += "; watch_rendezvous(Rendezvous(2, endpoint=sys.argv[1]), patience_seconds=1.0); threading.Event().wait()"
STORE = "import socket; store = socket.create_server(('', 29515)); print('up', flush=True)"
STORE += "; exec('while True: store.accept()[0].close(); print(1, flush=True)')"


def test_an_agent_ends_when_the_host_of_the_rendezvous_vanishes(tmp_path: Path) -> None:
    with hosts(2) as (first, second):
        outputs = {host: tmp_path / host.name for host in (first, second)}
        with outputs[first].open("w") as output:
            store = first.start([sys.executable, "-c", STORE], output)
        wait_until(lambda: "up" in outputs[first].read_text(), lambda: "")
        with outputs[second].open("w") as output:
            agent = second.start([sys.executable, "-c", WATCHED, f"{first.name}:29515"], output)
        wait_until(lambda: "1" in outputs[first].read_text(), lambda: "the agent never called")
        first.lose()
        store.wait()
        assert agent.wait(timeout=PATIENCE_SECONDS) == 1
        line = f"the host of the rendezvous at {first.name}:29515 has not answered for 1 s"
        assert line in outputs[second].read_text()
