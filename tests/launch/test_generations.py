"""Nodes of one machine that come and go: their ranks live on, and nobody loses a round."""

import json
import platform
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from helpers.commands import SMALL, environment, train_command, wait_until
from helpers.ports import free_port

SETTINGS = (
    *SMALL, "algorithm=diloco", "pool.trainers=1", "algorithm.round=updates", "algorithm.updates_per_round=10",
    "batching.request=none", "budget=100000rounds", "checkpoint.every=1000rounds", "run.directory=run",
    "run.unfinished=resume", "cluster.threads_per_rank=1",
)  # fmt: skip


class Nodes:
    """Drivers, each in a folder of its own, and what they have printed."""

    def __init__(self, folder: Path, nodes: str, ranks: int = 1) -> None:
        self.folder, self.port = folder, free_port()
        self.options: tuple[str, ...] = ("--nnodes", nodes, "--nproc-per-node", str(ranks), "--max-restarts", "3")
        self.drivers: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *settings: str) -> None:
        place = ("--rdzv-endpoint", f"localhost:{self.port}", "--local-addr", "localhost")
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / name / "output").open("a") as output:
            self.drivers[name] = subprocess.Popen(
                train_command(*self.options, *place, *SETTINGS, *settings),
                cwd=self.folder / name, env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def output(self, name: str) -> str:
        return (self.folder / name / "output").read_text()

    def everything(self) -> str:
        return "\n".join(f"{name}:\n{self.output(name)}" for name in self.drivers)

    def ranks(self, name: str) -> list[psutil.Process]:
        return psutil.Process(self.drivers[name].pid).children()

    def newest_round(self) -> int:
        return max(map(int, re.findall(r"^round (\d+) ", self.everything(), re.MULTILINE)), default=0)

    def wait_for_rounds(self, more: int) -> None:
        goal = self.newest_round() + more
        wait_until(lambda: self.newest_round() >= goal, self.everything)

    def wait_for(self, name: str, line: str, times: int = 1) -> None:
        wait_until(lambda: self.output(name).count(line) >= times, self.everything)

    def stop(self) -> list[int]:
        next(iter(self.drivers.values())).send_signal(signal.SIGINT)
        return [driver.wait(timeout=60) for driver in self.drivers.values()]

    def in_order(self) -> list[str]:
        """The nodes, the one that keeps the records first."""
        times = {name: (self.folder / name / "run" / "metrics.jsonl") for name in self.drivers}
        written = {name: path.stat().st_mtime if path.exists() else 0.0 for name, path in times.items()}
        return sorted(written, key=lambda name: -written[name])

    def recorded(self) -> dict[str, list[int]]:
        """The rounds of each node's records."""
        paths = {name: self.folder / name / "run" / "metrics.jsonl" for name in self.drivers}
        return {
            name: [json.loads(line)["round"] for line in path.read_text().splitlines()]
            for name, path in paths.items()
            if path.exists()
        }


@contextmanager
def training(folder: Path, names: Sequence[str], nodes: str, ranks: int = 1, *settings: str) -> Iterator[Nodes]:
    """Nodes that train together by now; killed at the end."""
    made = Nodes(folder, nodes, ranks)
    try:
        for name in names:
            made.start(name, *settings)
        if len(names) > 1:  # some may be slow, and join later
            together = f" on {ranks * len(names)} ranks"
            wait_until(lambda: together in made.everything(), made.everything)
        made.wait_for_rounds(2)
        yield made
    finally:
        for driver in made.drivers.values():
            left = [process for process in psutil.Process(driver.pid).children()] if driver.poll() is None else []
            for process in (driver, *left):
                process.kill()


def test_a_rank_that_is_killed_comes_back_and_no_update_is_lost(tmp_path: Path) -> None:
    """Workers follow the ranks: those of a lost one end, and a newcomer has a new one."""
    with training(tmp_path, "ab", "1:2") as nodes:
        first, other = nodes.in_order()
        nodes.ranks(other)[0].kill()
        nodes.wait_for(first, "lost; training goes on with 1 node")
        before = nodes.output(first).count("training goes on with 2 nodes")
        nodes.wait_for(first, "training goes on with 2 nodes", before + 1)
        nodes.wait_for_rounds(3)
        assert nodes.stop() == [75, 75], nodes.everything()
        assert "Traceback" not in nodes.everything()
        rows = [json.loads(line) for line in (tmp_path / first / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(len(rows)))
    workers = [row["workers"] for row in rows]
    changes = [later for earlier, later in pairwise(workers) if earlier != later]
    assert changes[-2:] == [1, 2], "two, then one, then two again"
    tokens = [row.get("pool_tokens", 0) for row in rows]
    assert all(earlier < later for earlier, later in pairwise(tokens))


@pytest.mark.parametrize(
    "settings",
    [
        ("pool.workers_per_trainer=3", "pool.trainers=2", "wire=slow_link", "wire.fragments=2", "wire.delay_updates=2"),
        ("outer.average_span=0.5", "wire=int8"),
    ],
)
def test_the_first_node_is_lost_with_two_ranks(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """It keeps the records, the store and the others' places; what is averaged may be on its way."""
    with training(tmp_path, "abc", "1:3", 2, *settings) as nodes:
        nodes.wait_for_rounds(3)
        first, *left = nodes.in_order()
        for rank in nodes.ranks(first):
            rank.kill()
        for name in left:
            nodes.wait_for(name, "training goes on with 2 nodes")
            nodes.wait_for(name, "training goes on with 3 nodes")
        nodes.wait_for_rounds(2)
        assert nodes.stop() == [75, 75, 75], nodes.everything()
        assert "Traceback" not in nodes.everything()
        assert "differs" not in nodes.everything()


def test_who_is_told_to_leave_does_so_and_the_others_lose_nothing(tmp_path: Path) -> None:
    """The first node, which keeps the records; and once all leave, the run is stopped."""
    with training(tmp_path, "abc", "1:3") as nodes:
        first, *left = nodes.in_order()
        nodes.drivers[first].send_signal(signal.SIGTERM)
        assert nodes.drivers[first].wait(timeout=60) == 75, nodes.everything()
        assert "the others go on, and the same command takes part again" in nodes.output(first)
        for name in left:
            nodes.wait_for(name, "training goes on with 2 nodes")
        nodes.wait_for_rounds(3)
        nodes.start(first)
        for name in left:
            nodes.wait_for(name, f"{platform.node()} new; training goes on with 3 nodes")
        nodes.wait_for_rounds(2)
        for driver in nodes.drivers.values():
            driver.send_signal(signal.SIGTERM)
        assert [driver.wait(timeout=60) for driver in nodes.drivers.values()] == [75, 75, 75], nodes.everything()
        assert "Traceback" not in nodes.everything()
        keeper = nodes.in_order()[0]
        run = json.loads((tmp_path / keeper / "run" / "run.json").read_text())
        recorded = nodes.recorded()[keeper]
    assert recorded == list(range(len(recorded)))
    changes = [start["why"] for start in run["resumed"]]
    assert changes[changes.index("a node left") + 1] == "newcomers"
    assert all(start["paused_seconds"] > 0 for start in run["resumed"])


def test_who_joins_has_the_settings_of_the_run(tmp_path: Path) -> None:
    """But for those of its machine."""
    with training(tmp_path, "a", "1:2", 1, "data.validation_fraction=0.1") as nodes:
        python, *command = train_command("--join", f"localhost:{nodes.port}", "--nproc-per-node", "1")
        (tmp_path / "b").mkdir()
        with (tmp_path / "b" / "output").open("a") as output:
            nodes.drivers["b"] = subprocess.Popen(
                [python, *command, "cluster.memory_bytes=4000000000"],
                cwd=tmp_path / "b", env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        nodes.wait_for("a", "training goes on with 2 nodes")
        nodes.wait_for_rounds(2)
        assert nodes.stop() == [75, 75], nodes.everything()
        assert f"joining the run at localhost:{nodes.port}: " in nodes.output("b")
        assert (tmp_path / "b" / "run" / "checkpoints").exists()


def test_who_brings_other_settings_or_data_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with training(tmp_path, "a", "1:3") as nodes:
        nodes.start("b", "inner.lr=0.1")
        nodes.start("c", "data.validation_fraction=0.2")
        for name, setting in (("b", "inner.lr"), ("c", "data.validation_fraction")):
            assert nodes.drivers[name].wait(timeout=120) == 2, nodes.everything()
            (line,) = [line for line in nodes.output(name).splitlines() if line.startswith("error: ")]
            assert f"{setting} differs" in line
        nodes.wait_for_rounds(2)
        assert "training goes on" not in nodes.output("a")
        for name in "bc":
            del nodes.drivers[name]
        assert nodes.stop() == [75], nodes.everything()


def test_a_newcomer_that_cannot_take_part_harms_nobody(tmp_path: Path) -> None:
    """It has no memory for the model, which shows when all have stopped for it."""
    with training(tmp_path, "a", "1:2") as nodes:
        nodes.start("b", "cluster.memory_bytes=1000")
        assert nodes.drivers["b"].wait(timeout=120) == 2, nodes.everything()
        assert "error: " in nodes.output("b")
        nodes.wait_for("a", "newcomers cannot take part, and training goes on without them")
        nodes.wait_for_rounds(3)
        del nodes.drivers["b"]
        assert nodes.stop() == [75], nodes.everything()
        recorded = nodes.recorded()["a"]
    assert recorded == list(range(len(recorded)))


def test_too_few_nodes_give_up_in_time(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3")
    nodes.options += ("--join-timeout", "8")
    nodes.start("a")
    assert nodes.drivers["a"].wait(timeout=120) == 2, nodes.everything()
    assert "did not bring together 2 to 3 nodes within 8 s" in nodes.output("a")
    assert not (tmp_path / "a" / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_others_can_be_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """Before the first of them comes, and when too few are left."""
    nodes = Nodes(tmp_path, "2:3")
    nodes.start("a")
    nodes.wait_for("a", "waiting at ")
    nodes.drivers["a"].send_signal(number)
    assert nodes.drivers["a"].wait(timeout=60) == 75, nodes.everything()
    with training(tmp_path, "bc", "2:3") as nodes:
        first, other = nodes.in_order()
        nodes.drivers[other].kill()
        nodes.wait_for(first, "waiting at ")
        nodes.drivers[first].send_signal(number)
        assert nodes.drivers[first].wait(timeout=60) == 75, nodes.everything()


def test_nodes_that_come_and_go_end_together_by_their_budget(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "2:3")
    for name in "ab":
        nodes.start(name, "budget=6rounds", "evaluation.final_sequences=8")
    codes = [nodes.drivers[name].wait(timeout=120) for name in "ab"]
    assert codes == [0, 0], nodes.everything()
    assert "ended: budget=6rounds reached" in nodes.everything()
    assert "lost" not in nodes.everything()
