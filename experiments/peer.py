"""torchft itself beside this program's default, on two real hosts at 10 Mbit/s: python experiments/peer.py.

Hosts are network namespaces (needs root); seconds are those of the clock on the wall, so nothing else may run. What
torchft reaches in its seconds, and by when ours reaches the same.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import MEASURED
from kept import seconds_to
from runs import on_hosts, saved_loss

from helpers.hosts import hosts, run_on

RATE = "10mbit"
NESTEROV, AVERAGE = {"outer_lr": 0.7, "outer_momentum": 0.9}, {"outer_lr": 1.0, "outer_momentum": 0.0}
WHOLE, STREAMED = {"updates": 50, "fragments": 1, "delay": 0}, {"updates": 70, "fragments": 2, "delay": 30}
SIDES: dict[str, dict[str, Any]] = {
    "DiLoCo, H 50": {**WHOLE, **NESTEROV, "lr": 1e-3},
    "averages, H 50": {**WHOLE, **AVERAGE, "lr": 2e-3},
    "streaming DiLoCo, H 70, 2 fragments, delay 30": {**STREAMED, **NESTEROV, "lr": 1e-3},
    "streaming averages, H 70, 2 fragments, delay 30": {**STREAMED, **AVERAGE, "lr": 2e-3},
}
"""Of torchft; the last is the best that was found of its methods (docs/evidence.md)."""


def theirs(seconds: float, seed: int, settings: dict[str, Any]) -> float:
    """The loss that torchft reaches."""
    with hosts(2, RATE) as made, tempfile.TemporaryDirectory() as folder:
        commands = []
        for rank, host in enumerate(made):
            place = {"rank": rank, "own": host.address, "master": made[0].address, "seconds": seconds, "seed": seed}
            script = str(Path(__file__).with_name("peer_rank.py"))
            commands.append((host, [sys.executable, script, json.dumps({**place, **settings})]))
        (code, output), *_ = run_on(commands, Path(folder), timeout_seconds=seconds + 300)
        if code:
            raise RuntimeError(output)
        return json.loads(output.splitlines()[-1])["loss"]


def ours(seconds: float, seed: int) -> float:
    """The loss that the default settings reach."""
    counted = (f"budget={seconds:g}seconds", f"seed={seed}")
    overrides = (*MEASURED, "model=tiny", "inner=adamw", "inner.lr=2e-3", *counted)
    return saved_loss(on_hosts(2, overrides, RATE, timeout_seconds=seconds + 300)[1]["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="that torchft has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    points = []
    for share in (0.2, 0.4, 0.7):
        points.append((share * options.seconds, ours(share * options.seconds, options.seed)))
        print(f"ours: {points[-1][1]:.4f} in {points[-1][0]:g} s", flush=True)
    for name, settings in SIDES.items():
        loss = theirs(options.seconds, options.seed, settings)
        equal = seconds_to(loss, points)
        print(f"torchft, {name}: {loss:.4f} in {options.seconds:g} s, ours in {equal:.1f} s; "
              f"torchft_10mbit = {options.seconds / equal:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
