"""Mistakes between two hosts are reported in one line before anything trains; the check measures what is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adloco_dist
from helpers.commands import FOUR_TRAINERS, PATIENT, ROOT, SMALL, break_outer_step, documented
from helpers.hosts import Host, hosts, run_on

pytestmark = pytest.mark.needs("hosts")


def driver(nodes: list[Host], *arguments: str, program: str = "train.py") -> list[str]:
    """The driver as docs/guide/nodes.md starts it on each of two hosts, with one rank on each."""
    command = documented("docs/guide/nodes.md", f"python launch/{program} --nnodes")
    ours = {"node1:29500": f"{nodes[0].name}:29511", "4": "1"}
    return [sys.executable, str(ROOT / command[1]), *(ours.get(word, word) for word in command[2:]), *arguments]


def errors(outputs: list[str]) -> list[str]:
    return [line for output in outputs for line in output.splitlines() if line.startswith("error: ")]


def assert_refused(done: list[tuple[int, str]], directory: Path) -> str:
    """Every host ends with code 2 and says why, once and in the same words; none has made anything."""
    outputs = [output for _, output in done]
    assert [code for code, _ in done] == [2] * len(done), "\n".join(outputs)
    assert [len(errors([output])) for output in outputs] == [1] * len(done), "\n".join(outputs)
    (line,) = set(errors(outputs))
    assert "Traceback" not in "".join(outputs)
    assert not list(directory.glob("*/runs"))
    return line


def test_the_check_shows_hosts_and_measures_their_link(tmp_path: Path) -> None:
    with hosts(2, rate="100mbit") as nodes:
        commands = [(host, driver(nodes, "--payload-mb", "4", program="check.py")) for host in nodes]
        done = run_on(commands, tmp_path)
    assert [code for code, _ in done] == [0, 0], done
    shown = "".join(output for _, output in done)
    for host in nodes:
        (row,) = [line.split() for line in shown.splitlines() if f" {host.name} " in line]
        assert row[3:5] == ["eth0", host.address]
        assert abs(float(row[-1])) < 100, "they share one clock"
    link, expected = [line.split() for line in shown.splitlines() if line.lstrip().startswith("0 - 1")]
    latency, megabytes_per_second, *averages = map(float, link[3:])
    fp32, *_, sparse = averages
    assert fp32 == pytest.approx(400 / megabytes_per_second, rel=0.02), "of 100M parameters"
    assert sparse < 0.03 * fp32
    # An all-reduce of two ranks sends as many bytes each way as its payload has; 100 Mbit/s are 12.5 MB/s.
    assert 6 < megabytes_per_second < 13.5
    assert 0 < latency < 100
    assert expected[-1] == "1.8x", "averages hide behind updates of 10 s, in rounds of two"
    assert "no differences that matter" in shown


def test_a_dry_run_on_the_nodes_predicts_what_their_link_costs(tmp_path: Path) -> None:
    with hosts(2, rate="10mbit") as nodes:
        rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].name}:29511"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *rendezvous]
        planned = [
            str(ROOT / "launch" / "train.py"),
            "--dry-run",
            *SMALL,
            "algorithm=diloco",
            PATIENT,
        ]
        done = run_on([(host, [*torchrun, "--local-addr", host.address, *planned]) for host in nodes], tmp_path)
    assert [code for code, _ in done] == [0, 0], "\n".join(output for _, output in done)
    shown = "".join(output for _, output in done)
    rows = [line.split("│") for line in shown[shown.index("by the measured links") :].splitlines()]
    (both,) = [row[2:] for row in rows if row[1:2] and row[1].strip() == "0,1"]
    seconds, *cells = both[:5]
    at_least = 0.47 * 8 / 10
    assert 0.9 * at_least < float(seconds) < 2 * at_least, "117,120 parameters in fp32, on a link with a short queue"
    shares = [int(cell.partition("%")[0]) for cell in cells]
    computing = [25 * update_seconds for update_seconds in (0.01, 0.1, 1, 10)]
    assert shares == pytest.approx([100 * one / (one + float(seconds)) for one in computing], abs=1)
    assert shares == sorted(shares)
    assert list(tmp_path.glob("*/runs")) == []


def test_an_interface_that_one_host_does_not_have(tmp_path: Path) -> None:
    with hosts(2) as nodes:
        wrong = {nodes[1].name: ["cluster.interface=eth9"]}
        done = run_on([(host, driver(nodes, *wrong.get(host.name, []))) for host in nodes], tmp_path)
    line = assert_refused(done, tmp_path)
    assert line == f"error: cluster.interface=eth9: {nodes[1].name} has no such interface with an address, but eth0, lo"


def test_hosts_that_cannot_reach_each_other(tmp_path: Path) -> None:
    """The loopback of one is no address for the other."""
    with hosts(2) as nodes:
        wrong = {nodes[1].name: ["cluster.interface=lo"]}
        done = run_on([(host, driver(nodes, *wrong.get(host.name, []))) for host in nodes], tmp_path)
    line = assert_refused(done, tmp_path)
    assert line.startswith(
        f"error: {nodes[0].name} (eth0 {nodes[0].address}) cannot reach {nodes[1].name} at 127.0.0.1"
    )
    assert line.endswith("open all ports between nodes, or set cluster.interface (docs/guide/network.md)")


def test_a_firewall_that_lets_only_the_rendezvous_through(tmp_path: Path) -> None:
    with hosts(2) as nodes, (tmp_path / "first").open("w") as output:
        ephemeral = ["ip", "rule", "add", "pref", "1", "ipproto", "tcp", "dport", "30000-60999", "prohibit"]
        subprocess.run(nodes[1].command(ephemeral), check=True)
        waiting = nodes[0].start(driver(nodes), output, cwd=tmp_path)
        done = run_on([(nodes[1], driver(nodes))], tmp_path)
    waiting.wait()  # it ended with its host
    line = assert_refused(done, tmp_path)
    assert line.startswith("error: MASTER_ADDR=")
    assert f"cannot be reached from {nodes[1].name}" in line


def test_a_node_that_never_comes(tmp_path: Path) -> None:
    with hosts(2) as nodes:
        ((code, output),) = run_on([(nodes[0], driver(nodes, "--join-timeout", "3"))], tmp_path)
    assert code == 1
    (line,) = errors([output])
    assert line.startswith(f"error: --rdzv-endpoint={nodes[0].name}:29511: did not bring together 2 nodes within 3 s")
    assert "Traceback" not in output


def test_other_code_on_one_host(tmp_path: Path) -> None:
    """As after an update that one machine missed."""
    other = tmp_path / "other" / "adloco_dist"
    shutil.copytree(Path(adloco_dist.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", other / "conf")
    (other / "round" / "steps.py").write_text((other / "round" / "steps.py").read_text() + "\n# changed\n")
    with hosts(2) as nodes:
        commands = [(host, driver(nodes)) for host in nodes]
        commands[1] = (nodes[1], ["env", f"PYTHONPATH={other.parent}", *commands[1][1]])
        done = run_on(commands, tmp_path)
    line = assert_refused(done, tmp_path)
    assert line.startswith("error: adloco_dist code differs between ranks: ")
    assert line.endswith("start every node with the same command and code")


def test_an_error_is_reported_once_and_the_other_host_says_whom_it_lost(tmp_path: Path) -> None:
    python_path = f"PYTHONPATH={break_outer_step(tmp_path, rank=1, trainer=1)}"
    settings = [
        *SMALL,
        *FOUR_TRAINERS,
        "merge=none",
        "pool.trainers=2",
        "pool.workers_per_trainer=2",
        "pool.placement=spread",
    ]
    with hosts(2) as nodes:
        done = run_on([(host, ["env", python_path, *driver(nodes, *settings)]) for host in nodes], tmp_path)
    detail = f"rank 1 on {nodes[1].name}, round 2, trainer 1: ArithmeticError: the outer step broke"
    assert [code for code, _ in done] == [1, 1]
    first, second = (output for _, output in done)
    assert errors([first, second]) == [f"error: {detail}"]
    assert f"error: {detail}" in second, "on the host whose rank failed"
    assert f"ended on {nodes[0].name}: {detail}" in first.splitlines()
    assert "Traceback" not in first + second
