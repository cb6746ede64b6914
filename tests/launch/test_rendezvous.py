"""Drivers that wait for each other: who is waited for is reported, every signal ends them, and nobody waits in vain."""

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_mistakes import assert_refused

from adloco_dist.launch.rendezvous import Rendezvous
from helpers.commands import SMALL, environment, run, running, train_command


def node(port: int, *arguments: str) -> list[str]:
    """The command of one of two nodes, both on this machine."""
    place = ("--local-addr", "localhost", "--rdzv-endpoint", f"localhost:{port}")
    return train_command("--nnodes", "2", "--nproc-per-node", "1", *place, *SMALL, *arguments)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextmanager
def foreign_program(answer: bytes | None) -> Iterator[int]:
    """Something that listens: silent for ever, or with an answer to whoever calls; its port."""
    with socket.create_server(("localhost", 0)) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                taken.append(connection)
                if answer is not None:
                    connection.close() if not answer else connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in taken:
            connection.close()


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("nosuchhost.invalid:29500", ["the host nosuchhost.invalid is not known on"]),
        ("localhost:abc", ["must be HOST:PORT"]),
        ("localhost:70000", ["must be HOST:PORT"]),
        (":29500", ["must be HOST:PORT"]),
        ("", ["must be HOST:PORT"]),
    ],
)
def test_an_endpoint_that_is_none(tmp_path: Path, endpoint: str, words: list[str]) -> None:
    done = run(train_command("--nnodes", "2", "--rdzv-endpoint", endpoint), tmp_path)
    assert_refused(done, tmp_path, f"--rdzv-endpoint={endpoint}: ", *words)


@pytest.mark.parametrize("endpoint", ["localhost", "127.0.0.1:7", "[::1]:29500"])
def test_endpoints(endpoint: str) -> None:
    host, port = Rendezvous(2, endpoint=endpoint).place()
    assert (host, port) in {("localhost", 29400), ("127.0.0.1", 7), ("::1", 29500)}


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        (["--rdzv-endpoint", "localhost:1"], "--rdzv-endpoint=localhost:1: has no effect on one node"),
        (["--join-timeout", "0"], "--join-timeout=0: must be from 1 to"),
        (["--nnodes", "2", "--rdzv-endpoint", "localhost:1", "--master-port", "5"], "--master-port=5: has no effect"),
        (
            ["--nproc-per-node", "500", "pool.trainers=4", "pool.workers_per_trainer=1"],
            "4 workers leave some of 500 ranks idle",
        ),
        (["--max-restarts", "2"], "--max-restarts=2: a run that is started again must find its checkpoints"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, options: list[str], detail: str) -> None:
    assert_refused(run(train_command(*options), tmp_path), tmp_path, detail)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
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
    with foreign_program(answer) as taken:
        done = run(node(taken), tmp_path, timeout_seconds=60)
    assert_refused(done, tmp_path, f"--rdzv-endpoint=localhost:{taken}: another program listens there")
    assert "frame #" not in done.output


def test_every_node_tells_why_all_refuse(tmp_path: Path, port: int) -> None:
    drivers = []
    for name, rate in (("a", "1e-3"), ("b", "2e-3")):
        (tmp_path / name).mkdir()
        drivers.append(
            subprocess.Popen(
                node(port, f"inner.lr={rate}"), cwd=tmp_path / name, env=environment(), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
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
    assert "ended: budget.rounds=3 reached" in output
    assert "ended: budget.rounds=3 reached" in second.output
