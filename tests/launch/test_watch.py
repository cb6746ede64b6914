"""The page of a run while it trains: it follows the run, shows nothing to strangers, and ends with the run."""

import re
import signal
import socket
import struct
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.browser import browser
from helpers.commands import (
    FOUR_TRAINERS,
    ONE_RANK,
    SMALL,
    environment,
    errors,
    run,
    running,
    tool,
    train_command,
    wait_until,
)
from helpers.run_directories import before_training, row, run_directory

LONG = (
    *SMALL, *FOUR_TRAINERS, "algorithm.updates_per_round=20", "budget=100000rounds", "run.directory=run",
    "run.watch=0", "cluster.threads_per_rank=1",  # a core is left to the page, which stands behind the ranks
)  # fmt: skip
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+/)([\w-]+)/")
SECRET_LENGTH = 32


def status(address: str, method: str = "GET") -> int:
    request = urllib.request.Request(address, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[str]:
    """The address of a run that does not train any more, shown by launch/watch.py."""
    directory = run_directory(tmp_path / "run", [*before_training(0), row(1)])
    (tmp_path / "secret").write_text("secret")
    process = subprocess.Popen(
        tool("watch.py", str(directory)), stdout=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path
    )
    assert process.stdout is not None
    try:
        found = ADDRESS.search(process.stdout.readline())
        assert found
        yield found[0]
    finally:
        process.terminate()
        process.communicate()


def test_a_tab_that_is_closed_while_it_loads_is_no_error(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", [*before_training(0), row(1)])
    with subprocess.Popen(
        tool("watch.py", str(directory)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        found = ADDRESS.search(process.stdout.readline())
        assert found
        address = urllib.parse.urlsplit(found[0])
        for _ in range(5):  # megabytes are on their way when the connection is reset
            with socket.create_connection((address.hostname, address.port)) as tab:
                tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                tab.sendall(f"GET {address.path}vega.js HTTP/1.1\r\nHost: here\r\n\r\n".encode())
                tab.recv(100)
        assert status(found[0]) == 200
        process.terminate()
        assert process.stderr.read() == ""


@pytest.mark.needs("browser")
def test_the_page_follows_a_run_and_ends_with_it(tmp_path: Path) -> None:
    with running(train_command(*ONE_RANK, *LONG), tmp_path) as (process, output):
        found = ADDRESS.search(output)
        assert found, output
        (watcher,) = [
            child for child in psutil.Process(process.pid).children(recursive=True) if "--descriptor" in child.cmdline()
        ]
        assert found[2] not in " ".join(watcher.cmdline()), "everybody on the machine sees arguments"
        wait_until(lambda: watcher.nice() == 10, lambda: "it takes the processor from the ranks")
        autogroup = Path(f"/proc/{watcher.pid}/autogroup")
        if autogroup.exists():  # then niceness counts within a session alone
            wait_until(lambda: autogroup.read_text().endswith(" nice 10\n"), autogroup.read_text)
        with browser() as shown:
            shown.open(found[0])
            first = shown.rounds()
            shown.wait_until_rounds(first + 5)
            assert min(shown.marks().values()) > 0
            shown.choose("seconds")
            shown.wait_until_rounds(shown.rounds() + 5)
            assert shown.axis_titles()["loss"] == ["seconds", "loss"], "what was chosen stays chosen"
            assert shown.errors() == []
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        wait_until(lambda: not watcher.is_running(), lambda: str(watcher.as_dict()))


def test_the_page_ends_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    with running(train_command(*ONE_RANK, *LONG), tmp_path) as (process, output):
        assert ADDRESS.search(output)
        children = psutil.Process(process.pid).children(recursive=True)
        (watcher,) = [child for child in children if "--descriptor" in child.cmdline()]
        watcher.parent().kill()  # type: ignore[union-attr]
        wait_until(lambda: not watcher.is_running(), lambda: str(watcher.as_dict()))


def test_nothing_is_shown_without_the_token_or_beside_the_run(watched: str) -> None:
    found = ADDRESS.match(watched)
    assert found
    host, token = found[1], found[2]
    assert len(token) >= SECRET_LENGTH
    for path in ("", "state", "vega.js"):
        assert status(f"{watched}{path}") == 200
    other = token[:-1] + ("a" if token[-1] != "a" else "b")
    for wrong in ("", "/", f"{other}/", f"{other}/state", f"{token[:-1]}/", "state", "vega.js", token):
        assert status(f"{host}{wrong}") == 404, wrong
    for beside in ("run.json", "metrics.jsonl", "../secret", "%2e%2e/secret", "/etc/passwd", "state/../../secret"):
        assert status(f"{watched}{beside}") == 404, beside
    for method in ("POST", "PUT", "DELETE"):
        assert status(watched, method) == 501, method


def test_a_token_is_another_one_each_time(tmp_path: Path, watched: str) -> None:
    """And another page can be open at the same time."""
    directory = tmp_path / "run"
    with subprocess.Popen(
        tool("watch.py", str(directory)), stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
    other, ours = ADDRESS.search(line), ADDRESS.match(watched)
    assert other and ours
    assert other[2] != ours[2]


def test_a_port_in_use_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(train_command("--nproc-per-node", "2", *SMALL, f"run.watch={port}"), tmp_path)
        assert done.code == 2
        (line,) = errors(done.output)
        assert line.startswith(f"error: run.watch={port}: cannot be listened on at 127.0.0.1 (Address already in use)")
        assert list(tmp_path.iterdir()) == []
        directory = run_directory(tmp_path / "run", [row(1)])
        done = run(tool("watch.py", str(directory), "--port", str(port)), tmp_path)
        assert done.code == 2
        (line,) = done.output.splitlines()
        assert line.startswith(f"error: --port={port}: cannot be listened on")


@pytest.mark.parametrize("setting", ["run.watch=70000", "run.watch=192.0.2.1:0"])
def test_where_nobody_can_listen_is_one_line(setting: str, tmp_path: Path) -> None:
    done = run(train_command(*ONE_RANK, *SMALL, setting), tmp_path)
    assert done.code == 2
    (line,) = errors(done.output)
    assert line.startswith(f"error: {setting}: ")
    assert list(tmp_path.iterdir()) == []
