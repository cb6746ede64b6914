"""The simulated clock beside two real hosts, which are network namespaces (needs root): python experiments/clock.py.

A run on the hosts, then the same on the clock with the seconds of an update, and those that a host computes for an
average, which it measured. The rate of the link is that of blocking averages of fp32, which are run first: the probe
before a run sends too little to tell how often a link with a short queue loses packets.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runs import ROOT, Record, on_hosts, rows_of

from helpers.hosts import Wan

WIRES = {
    "fp32": ("algorithm=localsgd", "algorithm.updates_per_round=1"),
    "int4": ("algorithm=localsgd", "wire=int4", "algorithm.updates_per_round=10"),
    "sparse": ("algorithm=localsgd", "wire=sparse", "wire.fraction=0.0625", "wire.delay_updates=2",
               "algorithm.updates_per_round=3"),
    "link": (),
}  # fmt: skip
COMMON = (
    "cluster.threads_per_rank=1", "pool.workers_per_trainer=2", "batching.request=none", "evaluation.every=null",
    "evaluation.final_sequences=8", "evaluation.sequences=8", "tracking=none", "run.report=false",
    "checkpoint.every=null",
)  # fmt: skip
ROUND_TRIP = 2
"""Latencies of an all-reduce between two hosts, of one element or many."""
BLOCKING_ROUNDS = 12
"""Of the averages that measure the link."""
FIRST = 3
"""Rounds that are not counted: caches are cold, and the link is being looked at."""


def real(overrides: Sequence[str], link: str | Wan) -> tuple[list[Record], Record]:
    """The rounds of a run on two hosts, and the facts of it."""
    rows, facts = on_hosts(2, (*COMMON, *overrides), link, timeout_seconds=600)
    return _counted(rows), facts


def simulated(overrides: Sequence[str]) -> list[Record]:
    """The rounds of the same run on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "2", *COMMON, *overrides,
                   "run.directory=run"]  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return _counted(rows_of(Path(folder) / "run"))


def _counted(rows: Sequence[Record]) -> list[Record]:
    return [row for row in rows if row["round"] > FIRST]


def average_rate(rounds: Sequence[Record], latency: float) -> float:
    """Bytes a second that each of two hosts sends in blocking averages, apart from their round trip."""
    return statistics.median(
        row["bytes_sent"]["outer"] / 2 / (row["seconds"]["outer"] - ROUND_TRIP * latency) for row in rounds
    )


def update_seconds(row: Record) -> float:
    return row["seconds"]["inner"] / row["updates"]


def computing_seconds(row: Record) -> float:
    """What a host computes for the averages of a round, in the mean of the hosts. Of averages that do not travel beside
    updates it cannot be told from their transfer: none."""
    ranks = row["rank_seconds"].values()
    return statistics.mean(rank["outer"] - rank.get("wait", 0.0) if "transfer" in rank else 0.0 for rank in ranks)


def seconds_per_update(rounds: Sequence[Record]) -> float:
    """All of the time, so that rounds of other lengths compare."""
    first, *later = rounds
    return (later[-1]["elapsed_seconds"] - first["elapsed_seconds"]) / sum(row["updates"] for row in later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=WIRES, help="one of them")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rate", default="10mbit", help="of the hosts' links")
    parser.add_argument("--delay-ms", type=float, help="hosts that are so far from each other, one way (needs cc)")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    model, budget = f"model={options.model}", f"budget={options.rounds}rounds"
    delay_ms, mbit = options.delay_ms, float(options.rate.removesuffix("mbit"))
    between = options.rate if delay_ms is None else Wan(delay_ms, rate_mbit=mbit)
    blocking, facts = real((model, f"budget={BLOCKING_ROUNDS}rounds", *WIRES["fp32"]), between)
    (link,) = facts["cluster"]["links"]
    latency = link["latency_seconds"] / ROUND_TRIP
    print(f"an average of one element takes {link['latency_seconds'] * 1e3:.4g} ms")
    rate = average_rate(blocking, latency)
    print(f"averages of fp32 go at {rate * 8e-6:.3g} Mbit/s")
    for name in [options.only] if options.only else WIRES:
        overrides = (model, budget, *WIRES[name])
        rounds = real(overrides, between)[0]
        update = statistics.median(map(update_seconds, rounds))
        computing = statistics.median(map(computing_seconds, rounds))
        clock = (f"simulation.update_seconds={update:.6f}",
                 f"simulation.average_seconds={computing:.6f}",
                 f"simulation.bytes_per_second={rate:.0f}",
                 f"simulation.latency_seconds={latency:.6f}")  # fmt: skip
        taken = seconds_per_update(rounds)
        counted = seconds_per_update(simulated((*overrides, *clock)))
        took = f"an update of {update:.4f} s, {computing:.4f} s of computing for an average"
        both = f"averages and all {taken:.4f} s an update, by the clock {counted:.4f} s"
        print(f"{name}: {took}; {both}; clock_over_real = {counted / taken:.3f}", flush=True)


if __name__ == "__main__":
    main()
