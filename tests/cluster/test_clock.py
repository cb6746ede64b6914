"""What compares seconds on two real hosts, while no other test takes the processor: the simulated clock, and the check
of links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT, environment
from helpers.hosts import Wan, linked, run_on, why_unavailable

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable()))


FAR = pytest.mark.needs("far")


@pytest.mark.parametrize("delay_ms", [0, pytest.param(25, marks=FAR), pytest.param(75, marks=FAR)])
def test_the_clock_counts_what_rounds_of_two_hosts_take(delay_ms: int) -> None:
    """With an update a round, where nine tenths of the time are the link's, whatever else this machine does."""
    far = ["--delay-ms", str(delay_ms)] if delay_ms else []
    command = [sys.executable, str(ROOT / "experiments" / "clock.py"), "--only", "fp32", "--model", "nano",
               "--rate", "10mbit", "--rounds", "40", *far]  # fmt: skip
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"clock_over_real = ([\d.]+)", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) == pytest.approx(1.0, abs=0.1)


@pytest.mark.needs("far")
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
    assert float(gain.removesuffix("x")) == pytest.approx(1.75, abs=0.06), "updates of 10 s all but hide an average"
