"""Hosts on one Linux machine, near each other or far: network namespaces with their own address, host name and link.

Needs root, and iproute2's `ip` and `tc`; hosts that are far from each other also a C compiler and /dev/net/tun.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

NETWORK = "10.79.{network}.{host}"
TIMEOUT_SECONDS = 180.0
RELAY = Path(__file__).with_name("wan.c")


@dataclass(frozen=True)
class Wan:
    """A wide-area network. The kernel here has no netem: hosts are connected by a relay (wan.c)."""

    delay_ms: float
    """One way; a round trip takes twice as long."""
    jitter_ms: float = 0.0
    """A packet takes up to so much longer, evenly distributed; none overtakes another."""
    rate_mbit: float = 10.0
    """Of each host's uplink."""
    loss_percent: float = 0.0


@dataclass(frozen=True)
class Host:
    """A host: commands started through `command` see its name, its address and its link alone."""

    name: str
    address: str
    link: Sequence[str]
    """The words of `ip` that name the device which is taken down where the host is cut off."""

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
        _run("ip", *self.link, "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _run("ip", *self.link, "up")

    def lose(self) -> None:
        """Lose the host as in a power cut: the link dies first, so that no connection is closed, then every process."""
        self.cut()
        _kill_all(self)

    def end(self) -> None:
        """End every process on the host, as a reboot does: the kernel closes their connections."""
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
def linked(count: int, link: "str | Wan | None") -> Iterator[list[Host]]:
    """`count` hosts near each other at a rate, unshaped without one, or on a wide-area network."""
    if isinstance(link, Wan):
        with far_hosts(count, link) as (made, _):
            yield made
    else:
        with hosts(count, link) as made:
            yield made


def why_not_far() -> str | None:
    """Why this machine cannot have hosts that are far from each other; None if it can."""
    if reason := why_unavailable():
        return reason
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun not found"
    return None if shutil.which("cc") else "cc not found (Debian package gcc)"


@contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """`count` hosts on one bridge, removed at the end with every process on them.

    Args:
        rate: rate of each host's link, as tc takes it ("100mbit"); None: unshaped.
    """
    with _named(count, is_far=False) as (made, cleanup):
        bridge = f"{_prefix()}br"
        _run("ip", "link", "add", bridge, "type", "bridge")
        cleanup.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in made:
            outer_end = f"{host.name}v"
            _run("ip", "link", "add", outer_end, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _run("ip", "link", "set", outer_end, "master", bridge, "up")
            _bring_up(host)
            if rate:
                shape = ["tbf", "rate", rate, "burst", "64kbit", "latency", "100ms"]
                _run("ip", "netns", "exec", host.name, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)
        yield made


@contextmanager
def far_hosts(count: int, wan: Wan) -> Iterator[tuple[list[Host], Callable[[Wan], None]]]:
    """`count` hosts on a wide-area network, removed as those of `hosts`; and what changes the network meanwhile."""
    with tempfile.TemporaryDirectory() as folder, _named(count, is_far=True) as (made, cleanup):
        program, devices = Path(folder) / "wan", f"{_prefix()}w"
        _run("cc", "-O2", "-o", str(program), str(RELAY))
        command = [str(program), devices, str(count), *_words(wan)]
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cleanup.callback(relay.communicate)  # which closes its input

        def tell(line: str, answer: str) -> None:
            assert relay.stdin
            assert relay.stdout
            relay.stdin.write(line)
            relay.stdin.flush()
            heard = relay.stdout.readline().strip()
            if heard != answer:
                raise RuntimeError(f"the relay said {heard!r}, and not {answer!r}")

        tell("", "ready")
        for number, host in enumerate(made, 1):
            _run("ip", "link", "set", f"{devices}{number}", "netns", host.name, "name", "eth0")
            _bring_up(host)
        yield made, lambda network: tell(" ".join(_words(network)) + "\n", "changed")


def _words(wan: Wan) -> list[str]:
    return [f"{value:g}" for value in astuple(wan)]


def _prefix() -> str:
    return f"ad{os.getpid() % 100000}"


@contextmanager
def _named(count: int, is_far: bool) -> Iterator[tuple[list[Host], ExitStack]]:
    """Hosts that know each other's names, and have no link yet; what is pushed on the stack is undone before them."""
    network = os.getpid() % 250
    made = []
    for number in range(1, count + 1):
        name = f"{_prefix()}n{number}"
        link = ("-n", name, "link", "set", "eth0") if is_far else ("link", "set", f"{name}v")
        made.append(Host(name, NETWORK.format(network=network, host=number), link))
    names = "".join(f"{host.address} {host.name}\n" for host in made)
    with ExitStack() as namespaces:
        for host in made:
            namespaces.callback(_remove, host)
            _run("ip", "netns", "add", host.name)
            files = Path("/etc/netns") / host.name
            files.mkdir(parents=True)
            (files / "hosts").write_text("127.0.0.1 localhost\n" + names)
        with ExitStack() as cleanup:
            cleanup.callback(lambda: [_kill_all(host) for host in made])
            yield made, cleanup


def _bring_up(host: Host) -> None:
    """Give the host's device its address, and bring it up, with the loopback."""
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", host.name, "link", "set", "eth0", "up")
    _run("ip", "-n", host.name, "link", "set", "lo", "up")


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
