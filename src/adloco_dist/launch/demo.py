"""What a slow link costs, and what is left of that: `launch/demo.py`.

Three runs of one model on a simulated clock, on which bytes take their time on a link: two machines that the link
joins, one machine alone, and DistributedDataParallel on the two.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from adloco_dist.command import as_tool
from adloco_dist.config import RunSettings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.report.several import page_of_several, reached
from adloco_dist.report.source import Source, read_source
from adloco_dist.report.write import write_page
from adloco_dist.terminal import reported_wait, show, to_type

LINK = (
    "simulation.bytes_per_second=1.25e6", "simulation.latency_seconds=0.01", "simulation.update_seconds=0.0044",
    "simulation.sequence_seconds=0.0018",
)  # fmt: skip
"""10 Mbit/s, and 10 ms one way; what `model=nano` takes on one core of a server."""
SHARED = (
    "model=nano", "evaluation.every=5%", "evaluation.sequences=256", "cluster.threads_per_rank=1", "tracking=none",
    "checkpoint.every=null", "budget=10seconds", *LINK,
)  # fmt: skip
"""Seconds are those of the simulated clock, on which one core computes an update in its true time."""
TOGETHER, ALONE, DDP = "two_machines", "one_machine", "ddp_on_two"
RUNS = {
    TOGETHER: (2, ()),
    ALONE: (1, ()),
    DDP: (
        2,
        ("algorithm=ddp", "algorithm.updates_per_round=5", "batching.local_batch=24", "inner=muon", "inner.lr=6e-2",
         "inner.schedule=wsd", "outer.average_span=0.1"),
    ),
}  # fmt: skip
"""Ranks and what differs, by run. DDP, which waits for every average, has the best of eleven pairs of batch (16 to 128)
and a rate (0.01 to 0.08), and all else as the others have it."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/demo.py."""
    parser = argparse.ArgumentParser(
        description="Train a small model on two machines that a slow link joins, on one alone, and on the two with "
        "DistributedDataParallel, by a simulated clock; compare them on a page. Takes a minute or two on two cores.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of all three, as for launch/train.py"
    )
    options = parser.parse_args(arguments)
    folder = Path(RunSettings().root) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-demo"
    with as_tool():
        compose([*SHARED, *options.overrides])  # a mistake is told before anything else
        show(
            "Two machines, 10 Mbit/s and 10 ms apart, on a simulated clock: a rank is a machine, bytes take their time."
        )
        with ThreadPoolExecutor() as executor:
            compared = [executor.submit(train, folder, name, options.overrides) for name in (ALONE, DDP)]
            train(folder, TOGETHER, options.overrides, is_shown=True)
            show("\nThe same model on one machine alone, and on the two with DistributedDataParallel, meanwhile.")
            with reported_wait(lambda: "training for comparison: still at it"):
                for run in compared:
                    run.result()
        sources = {name: read_source(folder / name) for name in RUNS}
        page = write_page(page_of_several([*sources.values()]), folder)
        show("\n".join(["", *comparison(sources), f"page: {page}", *next_steps(folder / TOGETHER)]))


def train(folder: Path, name: str, overrides: Sequence[str], is_shown: bool = False) -> None:
    """Make one of the runs; raises a SettingsError where it fails, with its last line. What is shown goes first, where
    processors are few."""
    num_ranks, own = RUNS[name]
    command = [
        *(() if is_shown else ("nice",)), sys.executable, "-m", "adloco_dist.launch",
        "--nproc-per-node", str(num_ranks), *SHARED, *own, f"run.directory={folder / name}", *overrides,
        *([] if is_shown else ["run.report=false"]),
    ]  # fmt: skip
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    pipe = None if is_shown else subprocess.PIPE
    done = subprocess.run(command, env=environment, stdout=pipe, stderr=pipe, text=True, check=False)
    if done.returncode:
        last = "" if is_shown else f": {done.stderr.strip().splitlines()[-1]}"
        raise SettingsError(f"{name} ended with exit code {done.returncode}{last}")


def comparison(sources: Mapping[str, Source]) -> list[str]:
    """What the runs came to in the same time, and when the two machines had come to it."""
    words = {TOGETHER: "two machines", ALONE: "one alone", DDP: "DistributedDataParallel"}
    ends = {name: _end(source) for name, source in sources.items()}
    losses = ", ".join(f"{words[name]} {loss:.4f}" for name, (loss, _) in ends.items())
    lines = [f"validation loss after {ends[TOGETHER][1]:.1f} s of that clock: {losses}"]
    loss = ends[ALONE][0]
    times = {name: cost["seconds"] for name, source in sources.items() if (cost := reached(source, loss))}
    told = [f"{words[name]} {f'{times[name]:.1f} s' if name in times else 'not in that time'}" for name in RUNS]
    lines.append(f"to a loss of {loss:.4f}: {', '.join(told)}")
    if TOGETHER in times and times[ALONE]:
        part = times[TOGETHER] / times[ALONE]
        lines.append(f"two machines took {part:.2f} of the time of one; 0.50 would be perfect")
    return lines


def _end(source: Source) -> tuple[float, float]:
    """The lowest validation loss of a run while it trained, and the seconds until then."""
    places, losses = source.history.best_validation
    if not len(losses):
        raise SettingsError(f"RUN={source.directory}: was never evaluated")
    return float(losses.min()), float(source.history.axes["seconds"][places[losses.argmin()]])


def next_steps(directory: Path) -> list[str]:
    """What to do with the model that was trained."""
    python = to_type(Path(sys.executable))
    return [
        f'next: {python} launch/generate.py {directory} "def main("',
        f"      {python} launch/train.py --help, and docs/guide/nodes.md for two real machines",
    ]
