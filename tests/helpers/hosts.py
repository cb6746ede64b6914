"""Hosts on one Linux machine: network namespaces with their own address, host name and shaped link.

Needs root, and iproute2's `ip` and `tc`.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

NETWORK = "10.79.{network}.{host}"
TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True)
class Host:
    """A host: commands started through `command` see its name, its address and its link alone."""

    name: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """`arguments` as they are run on this host."""
        rename = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", rename, self.name, *arguments]

    def start(self, arguments: Sequence[str], output: IO[str], cwd: Path | None = None) -> "subprocess.Popen[str]":
        """Start a process on this host, in a session of its own; both its streams go to `output`, a file."""
        return subprocess.Popen(
            self.command(arguments),
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def cut(self) -> None:
        """Take the host's link down: nothing comes or goes, and nobody is notified."""
        _run("ip", "link", "set", f"{self.name}v", "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _run("ip", "link", "set", f"{self.name}v", "up")

    def lose(self) -> None:
        """Lose the host as in a power cut: the link dies first, so that no connection is closed, then every process."""
        self.cut()
        _kill_all(self)

    def bytes_sent(self) -> int:
        """What left the host's link so far, by the kernel's own counter, all headers included."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(subprocess.run(self.command(["cat", path]), check=True, capture_output=True, text=True).stdout)


def run_on(
    commands: Sequence[tuple[Host, Sequence[str]]], directory: Path, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[tuple[int, str]]:  # fmt: skip
    """Start one command on each host, at once, and wait for all; exit code and output of each.

    Args:
        directory: every command runs in a folder of its own there, named by its host: nothing is shared but the link.
    """
    processes = []
    for host, arguments in commands:
        (directory / host.name).mkdir(exist_ok=True)
        with (directory / host.name / "output").open("w") as output:
            processes.append(host.start(arguments, output, cwd=directory / host.name))
    codes = [process.wait(timeout=timeout_seconds) for process in processes]
    return [
        (code, (directory / host.name / "output").read_text()) for code, (host, _) in zip(codes, commands, strict=True)
    ]


def why_unavailable() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not found (Debian packages iproute2 and util-linux)" if missing else None


@contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """`count` hosts on one bridge, removed at the end with every process on them.

    Args:
        rate: rate of each host's link, as tc takes it ("100mbit"); None: unshaped.
    """
    network = os.getpid() % 250
    prefix = f"ad{os.getpid() % 100000}"
    bridge = f"{prefix}br"
    made = [Host(f"{prefix}n{i}", NETWORK.format(network=network, host=i)) for i in range(1, count + 1)]
    names = "".join(f"{host.address} {host.name}\n" for host in made)
    with ExitStack() as cleanup:
        _run("ip", "link", "add", bridge, "type", "bridge")
        cleanup.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in made:
            cleanup.callback(_remove, host)
            _add(host, bridge, names, rate)
        yield made


def _add(host: Host, bridge: str, names: str, rate: str | None) -> None:
    _run("ip", "netns", "add", host.name)
    files = Path("/etc/netns") / host.name
    files.mkdir(parents=True)
    (files / "hosts").write_text("127.0.0.1 localhost\n" + names)
    outer_end = f"{host.name}v"
    _run("ip", "link", "add", outer_end, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _run("ip", "link", "set", outer_end, "master", bridge, "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", host.name, "link", "set", "eth0", "up")
    _run("ip", "-n", host.name, "link", "set", "lo", "up")
    if rate:
        shape = ["tbf", "rate", rate, "burst", "64kbit", "latency", "100ms"]
        _run("ip", "netns", "exec", host.name, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)


def _kill_all(host: Host) -> None:
    processes = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False).stdout
    subprocess.run(["kill", "-9", *processes.split()], check=False, capture_output=True)


def _remove(host: Host) -> None:
    _kill_all(host)
    # The kernel removes a namespace's links some time after the namespace; the next host may bear the same name.
    for rest in (("link", "del", f"{host.name}v"), ("netns", "del", host.name)):
        subprocess.run(["ip", *rest], check=False, capture_output=True)
    shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True)
