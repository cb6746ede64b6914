"""Hosts that are far from each other: a relay between them delays packets, varies their delay, and loses some."""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.clocks import CLOCKS
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


def train(made: list[Host], folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """One rank on each host, to the end; the rows of the records."""
    commands = []
    for host in made:
        place = ("--nnodes", str(len(made)), "--nproc-per-node", "1", "--local-addr", host.address, "--rdzv-endpoint",
                 f"{made[0].address}:29531")  # fmt: skip
        script = str(ROOT / "launch" / "train.py")
        commands.append((host, [sys.executable, script, *place, *QUICK, *overrides, "run.directory=run"]))
    done = run_on(commands, folder)
    assert [code for code, _ in done] == [0] * len(made), "\n".join(output for _, output in done)
    (metrics,) = folder.glob("*/run/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def round_trip_seconds(made: list[Host]) -> float:
    first, second = made
    answering = subprocess.Popen(first.command([sys.executable, "-c", ANSWER, first.address]))
    asked = second.command([sys.executable, "-c", ASK, first.address])
    found = float(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    answering.wait()
    return found


def test_the_check_measures_round_trips_and_says_what_to_expect(tmp_path: Path) -> None:
    with linked(2, Wan(delay_ms=25)) as made:
        place = ("--nnodes", "2", "--rdzv-endpoint", f"{made[0].address}:29531", "--payload-mb", "1")
        check = [sys.executable, str(ROOT / "launch" / "check.py"), *place]
        done = run_on([(host, [*check, "--local-addr", host.address]) for host in made], tmp_path)
    assert [code for code, _ in done] == [0, 0], done
    shown = "".join(output for _, output in done)
    measured, expected = [line for line in shown.splitlines() if line.lstrip().startswith("0 - 1")]
    round_trip_ms, _, fp32, *_ = map(float, measured.split()[3:])
    assert 50 < round_trip_ms < 65
    assert fp32 > 320, "400 MB at 10 Mbit/s"
    *_, gain = expected.split()
    assert expected.split()[3].endswith("%,")
    assert gain == "2x", "updates of 10 s hide an average"


def test_packets_take_their_time_and_the_network_can_change() -> None:
    with far_hosts(2, Wan(delay_ms=40)) as (made, change):
        assert round_trip_seconds(made) > 0.080
        change(Wan(delay_ms=1))
        assert round_trip_seconds(made) < 0.080


def test_a_run_is_the_same_at_any_distance(tmp_path: Path) -> None:
    """Reports and plans travel meanwhile: what is decided does not follow when they arrive."""
    found = []
    for number, link in enumerate(("1gbit", Wan(delay_ms=50, rate_mbit=100))):
        (tmp_path / str(number)).mkdir()
        with linked(2, link) as made:
            rows = train(made, tmp_path / str(number), *FIXED)
        found.append([{key: value for key, value in row.items() if key not in CLOCKS} for row in rows])
    assert [row["round"] for row in found[0]] == list(range(9))
    assert found[0] == found[1]


def test_lost_packets_and_jitter_end_nothing(tmp_path: Path) -> None:
    with far_hosts(3, Wan(delay_ms=20, jitter_ms=20, rate_mbit=20, loss_percent=1)) as (made, _):
        rows = train(made, tmp_path, "budget=12rounds", "evaluation.every=4rounds")
    assert rows[-1]["round"] == 12
    assert rows[-1]["validation_perplexity"] < 0.5 * rows[0]["validation_perplexity"]
    resent = [of_rank["resent_packets"] for row in rows[1:] for of_rank in row["resources"].values()]
    assert sum(resent) > 0, "and the records say so"


def test_rounds_follow_a_link_that_changes(tmp_path: Path) -> None:
    """From 50 to a quarter of a Mbit/s in the middle of a run: an average is given more time."""
    with far_hosts(2, Wan(delay_ms=5, rate_mbit=50)) as (made, change), ThreadPoolExecutor(1) as threads:

        def slow_down() -> None:
            def is_on_its_way() -> bool:
                return any(_num_rows(path) > 35 for path in tmp_path.glob("*/run/metrics.jsonl"))

            wait_until(is_on_its_way, lambda: "the run did not come to its 35th round")
            change(Wan(delay_ms=5, rate_mbit=0.25))

        changed = threads.submit(slow_down)
        rows = train(made, tmp_path, "budget=60rounds", "evaluation.every=null")
        changed.result()
    delays = [row["delay_updates"] for row in rows if row["round"]]
    assert statistics.median(delays[15:35]) < statistics.median(delays[-10:])


def _num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n")
