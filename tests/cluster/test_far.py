"""Hosts that are far from each other: a relay between them delays packets, varies their delay, and loses some."""

import json
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adloco_dist.config import EXIT_STOPPED
from adloco_dist.report.source import read_source
from adloco_dist.report.words import sentences
from adloco_dist.report.write import page
from adloco_dist.run.directory import STOP_FILE
from helpers.clocks import without_clocks
from helpers.commands import ROOT, wait_until
from helpers.hosts import Host, Wan, far_hosts, linked, run_on

pytestmark = pytest.mark.needs("far")

QUICK = (
    "model=nano", "data.sequence_length=64", "evaluation.sequences=16", "evaluation.final_sequences=16",
    "tracking=none", "run.report=false", "cluster.threads_per_rank=1",
)  # fmt: skip
FIXED = ("algorithm=diloco", "algorithm.updates_per_round=3", "wire.delay_updates=1", "wire=int4", "budget=8rounds",
         "batching.request=ramp", "batching.capacity=16", "checkpoint.every=null")  # fmt: skip
ANSWER = """
import socket, sys
connection, _ = socket.create_server((sys.argv[1], 5001)).accept()
while connection.recv(1):
    connection.sendall(b"!")
"""
ASK = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5001))
        break
    except ConnectionRefusedError:
        pass
times = []
for _ in range(5):
    start = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    times.append(time.perf_counter() - start)
print(min(times))
"""


LATE_CLOCK = """
import time
present = time.time
time.time = lambda: present() - 3 * 3600
"""


def resent_packets(host: Host) -> int:
    """Of TCP, since the host is there."""
    shown = subprocess.run(host.command(["cat", "/proc/net/snmp"]), check=True, capture_output=True, text=True).stdout
    names, values = (line.split() for line in shown.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def train(made: list[Host], folder: Path, *overrides: str, clock: Path | None = None) -> list[dict[str, Any]]:
    """One rank on each host, to the end; the rows of the records.

    Args:
        clock: a folder with the module of another clock, for all hosts but the first.
    """
    done = run_on(commands_of(made, *overrides, "run.directory=run", clock=clock), folder)
    assert [code for code, _ in done] == [0] * len(made), "\n".join(output for _, output in done)
    (metrics,) = folder.glob("*/run/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def commands_of(made: list[Host], *words: str, clock: Path | None = None) -> list[tuple[Host, list[str]]]:
    """One rank on each host; arguments as of `train`."""
    commands = []
    for host in made:
        place = ("--nnodes", str(len(made)), "--nproc-per-node", "1", "--local-addr", host.address, "--rdzv-endpoint",
                 f"{made[0].address}:29531")  # fmt: skip
        script = str(ROOT / "launch" / "train.py")
        python = ["env", f"PYTHONPATH={clock}", sys.executable] if clock and host is not made[0] else [sys.executable]
        commands.append((host, [*python, script, *place, *QUICK, *words]))
    return commands


def round_trip_seconds(made: list[Host]) -> float:
    first, second = made
    answering = subprocess.Popen(first.command([sys.executable, "-c", ANSWER, first.address]))
    asked = second.command([sys.executable, "-c", ASK, first.address])
    found = float(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    answering.wait()
    return found


def test_packets_take_their_time_and_the_network_can_change() -> None:
    with far_hosts(2, Wan(delay_ms=40)) as (made, change):
        assert round_trip_seconds(made) > 0.080
        change(Wan(delay_ms=1))
        assert round_trip_seconds(made) < 0.080


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run on hosts near each other, without what clocks show."""
    with linked(2, "1gbit") as made:
        rows = without_clocks(train(made, tmp_path_factory.mktemp("near"), *FIXED))
    assert [row["round"] for row in rows] == list(range(9))
    return rows


def test_a_run_is_the_same_at_any_distance(near: list[dict[str, Any]], tmp_path: Path) -> None:
    """Reports and plans travel meanwhile: what is decided does not follow when they arrive."""
    with linked(2, Wan(delay_ms=50, rate_mbit=100)) as made:
        assert without_clocks(train(made, tmp_path, *FIXED)) == near


def test_a_stop_over_a_distance_is_resumed_as_if_it_had_not_been(near: list[dict[str, Any]], tmp_path: Path) -> None:
    with linked(2, Wan(delay_ms=50, rate_mbit=100)) as made, ThreadPoolExecutor(1) as threads:
        training = threads.submit(run_on, commands_of(made, *FIXED, "run.directory=run"), tmp_path)

        def is_on_its_way() -> bool:
            return any(_num_rows(path) > 2 for path in tmp_path.glob("*/run/metrics.jsonl"))

        wait_until(is_on_its_way, lambda: "the run did not come to its second round")
        (metrics,) = tmp_path.glob("*/run/metrics.jsonl")
        (metrics.parent / STOP_FILE).touch()
        assert [code for code, _ in training.result()] == [EXIT_STOPPED] * 2
        assert _num_rows(metrics) < len(near)
        assert without_clocks(train(made, tmp_path, *FIXED, "run.unfinished=resume")) == near


def test_a_run_says_how_little_hosts_are_worth_that_are_further_apart_than_a_round_is_long(tmp_path: Path) -> None:
    """A round trip takes several updates, more of them on a fast machine."""
    with linked(2, Wan(delay_ms=150, rate_mbit=100)) as made:
        (tmp_path / "far").mkdir()
        rows = train(made, tmp_path / "far", "budget=12seconds", "evaluation.every=null")
    delays = [row["delay_updates"] for row in rows if row["round"]]
    assert delays[-1] > delays[0], "averages are given the time that they need"
    (metrics,) = tmp_path.glob("far/*/run/metrics.jsonl")
    (said,) = [line for line in sentences(read_source(metrics.parent)) if " of one alone " in line]
    estimated = re.search(r" up to ([\d.]+) times ", said)
    assert estimated and float(estimated[1]) < 1.9, said


def test_a_dry_run_counts_the_round_trips_of_an_average(tmp_path: Path) -> None:
    seconds = []
    for delay_ms in (0, 50):
        with linked(2, Wan(delay_ms=delay_ms, rate_mbit=10)) as made:
            folder = tmp_path / str(delay_ms)
            folder.mkdir()
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].address}:29531"]  # fmt: skip
            planned = [str(ROOT / "launch" / "train.py"), "--dry-run", *QUICK]
            done = run_on([(host, [*torchrun, "--local-addr", host.address, *planned]) for host in made], folder)
        assert [code for code, _ in done] == [0, 0], "\n".join(output for _, output in done)
        shown = "".join(output for _, output in done)
        rows = [line.split("│") for line in shown[shown.index("by the measured links") :].splitlines()]
        (both,) = [row[2:] for row in rows if row[1:2] and row[1].strip() == "0,1"]
        seconds.append(float(both[0]))
        assert "gain: the progress of 2 workers over that of one is at most " in shown
        assert all(" H " in cell or cell.strip().endswith("x") for cell in both[1:5]), both
    assert seconds[0] < 0.1 <= seconds[1] < seconds[0] + 0.2, "one round trip of 0.1 s, or two"


def test_a_link_that_stands_still_for_a_while_costs_that_while(near: list[dict[str, Any]], tmp_path: Path) -> None:
    """Every packet is lost until hosts have sent several again: shorter than a rank may be silent."""
    link = Wan(delay_ms=5, rate_mbit=100)
    with far_hosts(2, link) as (made, change), ThreadPoolExecutor(1) as threads:

        def resent() -> int:
            return sum(resent_packets(host) for host in made)

        def stand_still() -> None:
            def is_on_its_way() -> bool:
                return any(_num_rows(path) > 3 for path in tmp_path.glob("*/run/metrics.jsonl"))

            wait_until(is_on_its_way, lambda: "the run did not come to its third round")
            before = resent()
            change(replace(link, loss_percent=100))
            wait_until(lambda: resent() > before + 6, lambda: f"{resent() - before} packets were sent again")
            change(link)

        changed = threads.submit(stand_still)
        rows = train(made, tmp_path, *FIXED)
        changed.result()
    assert without_clocks(rows) == near
    assert max(of_rank.get("wait", 0.0) for row in rows[1:] for of_rank in row["rank_seconds"].values()) > 0.2, (
        "a resending"
    )


def test_clocks_that_are_hours_apart(tmp_path: Path) -> None:
    """The run says so, and ends when its seconds are over."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(LATE_CLOCK, encoding="utf-8")
    with linked(2, Wan(delay_ms=5, rate_mbit=100)) as made:
        rows = train(made, tmp_path, "budget=5seconds", "evaluation.every=null", clock=tmp_path / "clock")
    assert 3 < rows[-1]["elapsed_seconds"] < 10
    said = (tmp_path / made[0].name / "output").read_text(encoding="utf-8")
    (line,) = [line for line in said.splitlines() if f"the clock of {made[1].name}" in line]
    assert "is -10800." in line or "is -10799." in line


@pytest.mark.parametrize("loss_percent", [0.1, 1])
def test_lost_packets_and_jitter_end_nothing(loss_percent: float, tmp_path: Path) -> None:
    with far_hosts(3, Wan(delay_ms=20, jitter_ms=20, rate_mbit=20, loss_percent=loss_percent)) as (made, _):
        rows = train(made, tmp_path, "budget=12rounds", "evaluation.every=4rounds")
    assert rows[-1]["round"] == 12
    assert rows[-1]["validation_perplexity"] < 0.5 * rows[0]["validation_perplexity"]
    resent = [of_rank["resent_packets"] for row in rows[1:] for of_rank in row["resources"].values()]
    assert sum(resent) > 0 or loss_percent < 1, "and the records say so"


def test_rounds_follow_a_link_that_changes_and_changes_back(tmp_path: Path) -> None:
    """From 50 to a quarter of a Mbit/s in the middle of a run: an average is given more time, and less after that."""
    fast, slow = Wan(delay_ms=5, rate_mbit=50), Wan(delay_ms=5, rate_mbit=0.25)
    with far_hosts(2, fast) as (made, change), ThreadPoolExecutor(1) as threads:

        def change_at(num_rows: int, link: Wan) -> None:
            def is_on_its_way() -> bool:
                return any(_num_rows(path) > num_rows for path in tmp_path.glob("*/run/metrics.jsonl"))

            wait_until(is_on_its_way, lambda: f"the run did not come to its round {num_rows}")
            change(link)

        def slow_down_for_a_while() -> None:
            change_at(35, slow)
            change_at(60, fast)

        changed = threads.submit(slow_down_for_a_while)
        rows = train(made, tmp_path, "budget=90rounds", "evaluation.every=null")
        changed.result()
    delays = [row["delay_updates"] for row in rows if row["round"]]
    before, meanwhile, after = (statistics.median(part) for part in (delays[15:35], delays[50:60], delays[-10:]))
    assert before < meanwhile > after
    (directory,) = (path.parent for path in tmp_path.glob("*/run/metrics.jsonl"))
    points: Any
    (points,) = (figure.points for figure in page([read_source(directory)]).figures if figure.name == "transfer")
    travelled = [
        statistics.median(
            point["seconds of a round"]
            for point in points
            if point["series"] == "rank 0" and first <= point["round"] < last
        )
        for first, last in ((15, 35), (50, 60), (80, 91))
    ]
    assert travelled[0] < travelled[1] > travelled[2], "and the page shows it"


def _num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n")
