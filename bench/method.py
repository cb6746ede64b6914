"""What Muon and a second machine are worth: times to a loss, over those of the default with AdamW and of one alone.

A small version of experiments/machines.py, with `nano`, on a simulated clock: what it prints depends on no speed of a
machine. A second machine is worth less to `nano` than to `tiny`: sketches of gradients are as large, and weigh seven
times as much.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from cases import idle_cores
from kept import Records
from machines import SEEDS, runs_of
from ratios import ratios
from runs import make

from common import parse, report, spread

SIDES = ("alone_muon", "default_alone", "two_10", "two_100", "two_10_adamw", "alone_adamw")


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    seeds = SEEDS[:1] if options.quick else SEEDS
    with tempfile.TemporaryDirectory() as folder:
        records = Records(make(runs_of(SIDES, "nano", seeds), Path(folder), idle_cores()))
    found = ratios(records)
    figures = {name: sum(values) / len(values) for name, values in found.items()}
    rows = [[name, *spread(values)] for name, values in found.items()]
    title = f"nano on the clock of tiny, {len(seeds)} seed(s): time to the other side's loss, over its time"
    report(title, ["", "least", "median", "most"], rows, figures, options.json)


if __name__ == "__main__":
    main()
