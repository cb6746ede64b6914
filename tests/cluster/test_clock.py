"""The simulated clock against two real hosts."""

import re
import subprocess
import sys

import pytest

from helpers.commands import ROOT, environment
from helpers.hosts import why_unavailable

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable()))


def test_the_clock_counts_what_rounds_of_two_hosts_take() -> None:
    """With an update a round, where nine tenths of the time are bytes on the link, whatever else this machine does."""
    command = [sys.executable, str(ROOT / "experiments" / "clock.py"), "--only", "fp32", "--model", "nano",
               "--rate", "10mbit", "--rounds", "40"]  # fmt: skip
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"clock_over_real = ([\d.]+)", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) == pytest.approx(1.0, abs=0.1)
