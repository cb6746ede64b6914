"""Hosts that are lost with all they hold, and come back, under the commands of docs/guide/reliability.md."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.commands import PATIENCE_SECONDS, ROOT, documented, wait_until
from helpers.hosts import Host, hosts

SETTINGS = (
    "algorithm=diloco", "model=nano", "pool.trainers=2", "pool.workers_per_trainer=2", "batching.request=none",
    "merge=none", "data.sequence_length=32", "algorithm.updates_per_round=10", "budget=100000rounds",
    "evaluation.every=1rounds", "evaluation.sequences=4", "tracking=none", "run.report=false",
    "cluster.threads_per_rank=1",
    "checkpoint.every=1rounds",
)  # fmt: skip
"""Every round is evaluated, since those are printed, and what is printed says how far a job is."""

pytestmark = pytest.mark.needs("hosts")


def command(first: Host, host: Host) -> list[str]:
    """The driver of docs/guide/reliability.md on one of two hosts, one rank on each."""
    ours = {
        "python": [sys.executable],
        "launch/train.py": [str(ROOT / "launch" / "train.py")],
        "2:3": ["1:2", "--nproc-per-node", "1", "--local-addr", host.address],
        "node1:29500": [f"{first.name}:29514"],
        "...": [],
    }
    start = "python launch/train.py --nnodes 2:3"
    return [word for theirs in documented("docs/guide/reliability.md", start) for word in ours.get(theirs, [theirs])]


class Job:
    """The driver on each of two hosts, in a folder of its own, and what all of them have printed."""

    def __init__(self, nodes: Sequence[Host], folder: Path, *more_settings: str) -> None:
        self.nodes, self.settings = nodes, (*SETTINGS, *more_settings)
        self.outputs = {host: folder / host.name / "output" for host in nodes}
        self.drivers: dict[Host, subprocess.Popen[str]] = {}

    def start(self, host: Host) -> None:
        self.outputs[host].parent.mkdir(exist_ok=True)
        with self.outputs[host].open("a") as output:
            line = [*command(self.nodes[0], host), *self.settings]
            self.drivers[host] = host.start(line, output, cwd=self.outputs[host].parent)

    def everything(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs.values() if output.exists())

    def newest_round(self) -> int:
        detail = [line for line in self.everything().splitlines() if line.startswith("round ")]
        return max((int(line.split()[1].strip(",;")) for line in detail), default=0)

    def wait_for(self, detail: str) -> None:
        wait_until(lambda: detail in self.everything(), self.everything)

    def wait_for_rounds(self, more: int) -> None:
        goal = self.newest_round() + more
        wait_until(lambda: self.newest_round() >= goal, self.everything)

    def stop(self) -> list[int]:
        """Ask all drivers to stop; their exit codes."""
        for host, driver in self.drivers.items():
            subprocess.run(host.command(["kill", "-INT", str(driver.pid)]), check=False)
        return [driver.wait(timeout=60) for driver in self.drivers.values()]


def rounds(folder: Path) -> list[int]:
    """The rounds of the records in a host's folder."""
    (records,) = folder.glob("runs/*/metrics.jsonl")
    return sorted({json.loads(line)["round"] for line in records.read_text().splitlines()})


def test_a_host_that_is_lost_with_all_it_has_costs_no_round_and_is_taken_back(tmp_path: Path) -> None:
    with hosts(2) as (first, second):
        travelling = ("wire=slow_link", "wire.fragments=2", "wire.delay_updates=2")
        job = Job((first, second), tmp_path, *travelling)
        for host in job.nodes:
            job.start(host)
        job.wait_for_rounds(3)
        second.lose()
        job.drivers[second].wait()
        shutil.rmtree(job.outputs[second].parent / "runs")
        job.wait_for(f"{second.name} lost; training goes on with 1 node")
        job.wait_for_rounds(2)
        second.mend()
        job.start(second)
        job.wait_for(f"{second.name} new; training goes on with 2 nodes")
        job.wait_for_rounds(2)
        assert job.stop() == [75, 75], job.everything()
    assert "Traceback" not in job.everything()
    recorded = rounds(tmp_path / first.name)
    assert recorded == list(range(len(recorded)))
    (records,) = (tmp_path / first.name / "runs").glob("*/run.json")
    lost = [start["lost_hosts"] for start in json.loads(records.read_text())["resumed"]]
    assert lost == [[second.name], []]


def test_the_host_that_others_look_for_may_be_lost_as_well(tmp_path: Path) -> None:
    with hosts(2) as (first, second):
        job = Job((first, second), tmp_path)
        for host in job.nodes:
            job.start(host)
        job.wait_for_rounds(3)
        first.end()
        job.drivers[first].wait()
        job.wait_for(f"{first.name} lost; training goes on with 1 node")
        job.wait_for_rounds(2)
        job.start(first)
        job.wait_for(f"{first.name} new; training goes on with 2 nodes")
        job.wait_for_rounds(2)
        assert job.stop() == [75, 75], job.everything()
    assert "Traceback" not in job.everything()


def test_of_a_network_that_is_split_one_part_goes_on_and_takes_the_other_back(tmp_path: Path) -> None:
    with hosts(2) as (first, second):
        job = Job((first, second), tmp_path)
        for host in job.nodes:
            job.start(host)
        job.wait_for_rounds(3)
        second.cut()
        job.wait_for(f"{second.name} lost; training goes on with 1 node")
        job.wait_for_rounds(3)
        assert f"{first.name} lost" not in job.everything(), "the other part waits"
        second.mend()
        job.wait_for(f"{second.name} new; training goes on with 2 nodes")
        job.wait_for_rounds(2)
        assert job.stop() == [75, 75], job.everything()
    assert "Traceback" not in job.everything()
    assert "frame #" not in job.everything()


WATCHED = "import sys, threading; from adloco_dist.launch.rendezvous_watch import watch_rendezvous"
WATCHED += "; from adloco_dist.launch.rendezvous import Rendezvous"
WATCHED += "; watch_rendezvous(Rendezvous(2, 2, endpoint=sys.argv[1]), patience_seconds=1.0); threading.Event().wait()"
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
        line = f"the host of the rendezvous at {first.name}:29515 has not answered for"
        assert line in outputs[second].read_text()
