"""What a second machine is worth by the clock on the wall: python experiments/wall.py --seeds 10 11.

One host alone, and two at 10 Mbit/s, which are network namespaces (needs root), with the default settings on sequences
that no setting was chosen by. Nothing else may run. Two seeds of one alone train at once, so that in both cases two
ranks share the machine.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cases import COMPARED, MEASURED
from figures import seconds_to
from peer import RATE
from runs import ROOT, Record, facts_of, on_two_hosts, saved_loss

MARGIN_SECONDS = 300
"""For what a run does before and after its budget."""
SHARES = (0.5, 0.7)
"""Of the seconds of one alone, which two have."""


def overrides_of(seconds: float, seed: int) -> Sequence[str]:
    return (*MEASURED, COMPARED[0], "model=tiny", f"budget={seconds:g}seconds", f"seed={seed}")


def alone(seconds: float, seed: int) -> Record:
    """What one host alone comes to."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "1",
                   *overrides_of(seconds, seed), "run.directory=run"]  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return facts_of(Path(folder) / "run")["result"]


def together(seconds: float, seed: int) -> Record:
    """What two come to."""
    return on_two_hosts(overrides_of(seconds, seed), RATE, timeout_seconds=seconds + MARGIN_SECONDS)[1]["result"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="of one alone")
    parser.add_argument("--seeds", type=int, nargs=2, default=[10, 11])
    options = parser.parse_args()
    with ThreadPoolExecutor() as threads:
        ends = list(threads.map(lambda seed: alone(options.seconds, seed), options.seeds))
    for seed, end in zip(options.seeds, ends, strict=True):
        loss = saved_loss(end)
        points = [(share * options.seconds, saved_loss(together(share * options.seconds, seed))) for share in SHARES]
        ratio = seconds_to(loss, points) / options.seconds
        print(f"seed {seed}: alone {loss:.4f} in {options.seconds:g} s, two {points}; "
              f"second_machine_10mbit_wall = {ratio:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
