"""What a second machine is worth: the time of two hosts to the loss that one alone reaches, over its time.

A small version of experiments/, on a simulated clock: what it prints depends on no speed of this machine. A second
machine is worth less to `nano` than to `tiny`: sketches of gradients are as large, and weigh seven times as much.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from cases import FREE, NANO, NANO_SHARE, SEEDS, cases, idle_cores, link
from figures import Records, over_others, second_machine
from questions import ALONE
from runs import make

from common import parse, report, spread

SIDES = {"two_10": link("10", NANO_SHARE), "two_100": link("100", NANO_SHARE), "two_free": FREE}


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    seconds, budgets, seeds = 100.0, (50.0, 65.0), SEEDS[:1] if options.quick else SEEDS
    wanted = [*cases("second_machine", "alone", 1, (*NANO, *ALONE), (seconds,), seeds)]
    for side, overrides in SIDES.items():
        wanted += cases("second_machine", side, 2, (*NANO, *overrides), budgets, seeds)
    with tempfile.TemporaryDirectory() as folder:
        records = Records(make(wanted, Path(folder), idle_cores()))
    found = second_machine(records)
    found["second_machine_over_free"] = over_others(
        records, "second_machine", "two_10", {"free": "two_free"}, budgets[0]
    )["free"]
    figures = {name: sum(values) / len(values) for name, values in found.items()}
    columns = ["time to the loss of one alone, over its time", "least", "median", "most"]
    rows = [[name, *spread(values)] for name, values in found.items()]
    report(
        f"nano, {seconds:g} s alone on the clock of tiny, {len(seeds)} seed(s)", columns, rows, figures, options.json
    )


if __name__ == "__main__":
    main()
