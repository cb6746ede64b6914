"""Drivers that wait for each other: who is waited for is reported, every signal ends them, and nobody waits in vain."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest
from test_mistakes import assert_refused

from adloco_dist.launch.rendezvous import Rendezvous
from helpers.commands import SMALL, environment, foreign_program, run, running, train_command, wait_until
from helpers.ports import free_port


def node(port: int, *arguments: str) -> list[str]:
    """The command of one of two nodes, both on this machine."""
    place = ("--local-addr", "localhost", "--rdzv-endpoint", f"localhost:{port}")
    return train_command("--nnodes", "2", "--nproc-per-node", "1", *place, *SMALL, *arguments)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize("endpoint", ["localhost", "127.0.0.1:7", "[::1]:29500"])
def test_endpoints(endpoint: str) -> None:
    host, port = Rendezvous(2, 2, endpoint=endpoint).place()
    assert (host, port) in {("localhost", 29400), ("127.0.0.1", 7), ("::1", 29500)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_driver_that_waits(tmp_path: Path, port: int, number: signal.Signals) -> None:
    with running(node(port), tmp_path, until="waiting at") as (process, detail):
        assert f"waiting at localhost:{port} for 2 nodes: 1 is here ({socket.gethostname()})" in detail
        process.send_signal(number)
        output = process.communicate(timeout=20)[0]
    assert process.returncode == 75
    assert output == "stopped: no rank was running\n"


def test_a_signal_ends_a_driver_whose_rendezvous_does_not_listen(tmp_path: Path) -> None:
    """Its main thread is in a call that Python's handlers do not interrupt."""
    command = train_command("--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:29500", *SMALL)
    with running(command, tmp_path, until="waiting at") as (process, detail):
        assert "nothing listens there yet" in detail or "does not answer" in detail
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 75


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_foreign_program_on_the_port(tmp_path: Path, answer: bytes | None) -> None:
    with foreign_program(0, answer) as taken:
        done = run(node(taken), tmp_path, timeout_seconds=60)
    assert_refused(done, tmp_path, f"--rdzv-endpoint=localhost:{taken}: another program listens there")
    assert "frame #" not in done.output


def started(folder: Path, command: list[str]) -> "subprocess.Popen[str]":
    """A driver in a folder of its own, which is made."""
    folder.mkdir()
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("asked", [0, 1])
def test_an_elastic_job_stops_when_one_of_its_drivers_is_asked(tmp_path: Path, port: int, asked: int) -> None:
    """A rank waits for its own agent's signal meanwhile, and may outlive the one that held the ranks' store."""
    elastic = ("--max-restarts", "2", "run.directory=run", "run.unfinished=resume", "budget=100000rounds")
    drivers = [started(tmp_path / name, node(port, *elastic)) for name in ("a", "b")]
    try:
        wait_until(lambda: any(path.read_text().count("\n") > 3 for path in tmp_path.glob("*/run/metrics.jsonl")), str)
        drivers[asked].send_signal(signal.SIGINT)
        outputs = [driver.communicate(timeout=60)[0] for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()
    assert [driver.returncode for driver in drivers] == [75, 75], outputs
    assert "stopped: interrupted" in "".join(outputs)


def test_every_node_tells_why_all_refuse(tmp_path: Path, port: int) -> None:
    drivers = [
        started(tmp_path / name, node(port, f"inner.lr={rate}")) for name, rate in (("a", "1e-3"), ("b", "2e-3"))
    ]
    outputs = [driver.communicate(timeout=120)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [2, 2], outputs
    for output in outputs:
        assert output.count("error: inner.lr differs between ranks: ") == 1, output
    assert not list(tmp_path.rglob("runs"))


def test_nodes_meet_whenever_they_come(tmp_path: Path, port: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with running(node(port), tmp_path / "a", until="waiting at") as (first, _):
        second = run(node(port), tmp_path / "b")
        output = first.communicate(timeout=60)[0]
    assert (first.returncode, second.code) == (0, 0), output + second.output
    assert "ended: budget=3rounds reached" in output
    assert "ended: budget=3rounds reached" in second.output
