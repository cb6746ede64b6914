"""Two hosts that are far from each other, at 10 Mbit/s: where the time of their rounds goes (needs root, and cc).

Hosts are network namespaces, and a relay between them delays packets (tests/helpers/wan.c). Seconds are those of the
clock on the wall, so nothing else may run. `exposed_*` is the share of a run that is not spent in updates, after its
first tenth; `blocked_trips` are the round trips that a round waits for, beside what it waits for without a distance.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from cases import COMPARED, MEASURED
from runs import Record, on_two_hosts, saved_loss

from common import parse, report
from helpers.hosts import Wan

DELAYS_MS = (0, 25, 75)
"""One way."""
WARM = 0.1
"""Share of a run that is not counted: the first rounds find their length."""


def exposed(rows: list[Record]) -> tuple[float, float, float]:
    """Of the rows of a run: the share of the time that its ranks do not spend in updates, the seconds that this is in a
    round, and the mean H."""
    rounds = [row for row in rows if row["round"]]
    first, *counted = rounds[int(WARM * len(rounds)) :]
    elapsed = counted[-1]["elapsed_seconds"] - first["elapsed_seconds"]
    inner = sum(statistics.mean(rank["inner"] for rank in row["rank_seconds"].values()) for row in counted)
    length = statistics.mean(row["updates"] for row in counted)
    return 1 - inner / elapsed, (elapsed - inner) / len(counted), length


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    seconds, seeds = (30, (10,)) if options.quick else (60, (10, 11, 12))
    found: dict[int, list[tuple[float, float, float, float]]] = {delay: [] for delay in DELAYS_MS}
    for seed in seeds:
        for delay in DELAYS_MS:
            overrides = (*MEASURED, COMPARED[0], "model=tiny", f"budget={seconds}seconds", f"seed={seed}")
            rows, facts = on_two_hosts(overrides, Wan(delay_ms=delay, rate_mbit=10), seconds + 300)
            found[delay].append((*exposed(rows), saved_loss(facts["result"])))
    middle = {delay: [statistics.median(values) for values in zip(*runs, strict=True)] for delay, runs in found.items()}
    near, *_, far = DELAYS_MS
    trips = (middle[far][1] - middle[near][1]) / (2 * (far - near) * 1e-3)
    rows = []
    for delay, values in middle.items():
        losses = [loss for *_, loss in found[delay]]
        rows.append([f"{delay} ms", *(f"{value:.3f}" for value in (*values, min(losses), max(losses)))])
    figures = {f"exposed_far_{delay}": middle[delay][0] for delay in DELAYS_MS} | {"blocked_trips": trips}
    columns = ["one way", "not in updates", "seconds of a round", "H", f"loss after {seconds} s", "least", "most"]
    report(f"tiny on two hosts at 10 Mbit/s, medians of {len(seeds)} run(s)", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
