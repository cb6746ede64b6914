"""What a bad link costs: lost packets, jitter, a rate that changes, and checkpoints over a distance.

Needs root, and cc, as bench/far.py, whose two hosts at 10 Mbit/s these are. `tiny` trains with the default settings,
the clock on the wall, so nothing else may run. All networks in turn, in every seed. `exposed_*` is the share of a run
that is not spent in updates, after its first tenth, and `loss_*` what it comes to. `checkpoint_trips` are the round
trips for which a round that begins with a checkpoint takes longer than the others, 75 ms apart: averages under way are
waited for then, and ranks compare what they save. Copies go to the other host while later rounds are computed, which
`exposed_checkpoints` has beside `exposed_far`.
"""

import itertools
import json
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from runs import Record, on_these, saved_loss

from common import parse, report
from far import MARGIN_SECONDS, overrides_of, rounds_of
from helpers.hosts import Wan, far_hosts, why_not_far

CLEAR, FAR = Wan(delay_ms=25, rate_mbit=10), Wan(delay_ms=75, rate_mbit=10)
NETWORKS = {
    "clear": CLEAR,
    "lost_0.1": replace(CLEAR, loss_percent=0.1),
    "lost_1": replace(CLEAR, loss_percent=1.0),
    "jitter_20": replace(CLEAR, jitter_ms=20),
    "changing": CLEAR,
    "far": FAR,
    "checkpoints": FAR,
}
"""Two hosts, 25 ms one way but for the last two; what is lost is in %."""
SLOW = replace(CLEAR, rate_mbit=2)
"""The changing network in the middle third of a run."""
SECONDS, QUICK_SECONDS = 90.0, 45.0
CHECKPOINTS = ("checkpoint.every=0.2minutes",)
LOOK_SECONDS, LAST_BYTES = 1.0, 1 << 14
"""Between two looks at a run's records, and what is read of them."""
Run = tuple[list[Record], float]
"""The rows of a run's records, and the loss to which it comes."""


def trained(name: str, seconds: float, seed: int) -> Run:
    """Train on one of the networks."""
    with far_hosts(2, NETWORKS[name]) as (made, change):

        def change_for_a_while(metrics: Path, has_ended: threading.Event) -> None:
            for share, network in ((1 / 3, SLOW), (2 / 3, CLEAR)):
                while elapsed_seconds(metrics) < share * seconds:
                    if has_ended.wait(LOOK_SECONDS):
                        return
                change(network)

        overrides = (*overrides_of(seconds, seed), *(CHECKPOINTS if name == "checkpoints" else ()))
        beside = change_for_a_while if name == "changing" else None
        rows, facts = on_these(made, overrides, seconds + MARGIN_SECONDS, beside=beside)
    return rows, saved_loss(facts["result"])


def elapsed_seconds(metrics: Path) -> float:
    """Those of the last whole row of a run's records."""
    if not metrics.exists():
        return 0.0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        *whole, _ = file.read().split(b"\n")
    return json.loads(whole[-1])["elapsed_seconds"] if whole else 0.0


def checkpoint_seconds(rows: Sequence[Record]) -> float:
    """How much longer than the others a round that begins with a checkpoint takes beside its updates."""
    exposed: dict[bool, list[float]] = {True: [], False: []}
    for before, row in itertools.pairwise(rows[1:]):
        of_ranks = row["rank_seconds"].values()
        updates = statistics.mean(rank["inner"] for rank in of_ranks)
        saved = any("checkpoint" in rank for rank in of_ranks)
        exposed[saved].append(row["elapsed_seconds"] - before["elapsed_seconds"] - updates)
    return statistics.median(exposed[True]) - statistics.median(exposed[False])


def num_resent(rows: Sequence[Record]) -> float:
    """Packets that the hosts have sent again."""
    return sum(rank["resent_packets"] for row in rows[1:] for rank in row["resources"].values())


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    options = parser.parse_args()
    if reason := why_not_far():
        sys.exit(f"no hosts far from each other on this machine: {reason}")
    seconds, seeds = (QUICK_SECONDS, options.seeds[:1]) if options.quick else (SECONDS, options.seeds)
    found = {name: list[Run]() for name in NETWORKS}
    for seed in seeds:
        for name, runs in found.items():
            runs.append(trained(name, seconds, seed))
    table, figures = list[list[str]](), dict[str, float]()
    for name, runs in found.items():
        of_rounds = zip(*(rounds_of(rows) for rows, _ in runs), strict=True)
        counts = [*of_rounds, [loss for _, loss in runs], [num_resent(rows) for rows, _ in runs]]
        figures |= {f"exposed_{name}": statistics.median(counts[0]), f"loss_{name}": statistics.median(counts[-2])}
        cells = [f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})" for values in counts]
        table.append([name, *cells])
    trips = [checkpoint_seconds(rows) / (2e-3 * FAR.delay_ms) for rows, _ in found["checkpoints"]]
    figures["checkpoint_trips"] = statistics.median(trips)
    columns = ["network", "not in updates", "waiting", "s of a round", "H", "loss", "packets sent again"]
    report(f"tiny on two hosts, {seconds:g} s, medians of {len(seeds)} seeds", columns, table, figures, options.json)


if __name__ == "__main__":
    main()
