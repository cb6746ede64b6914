"""Two hosts that are far from each other, at 10 Mbit/s: what distance costs, and what a second host is worth.

Needs root, and cc: hosts are network namespaces, and a relay between them delays packets (tests/helpers/wan.c). Seconds
are those of the clock on the wall, so nothing else may run. `exposed_*` is the share of a run that is not spent in
updates, after its first tenth, `waiting_*` what of that is waiting rather than computing; `blocked_trips` are the round
trips that a round waits for, beside what it waits for without a distance. `far_over_near_*` is the time to the loss to
which two hosts without a distance come, over theirs; `second_machine_far_*` is that to the loss of one host alone, over
its time. Two seeds of one alone train at once, so that in all cases two ranks share the machine; then the two hosts of
each of these seeds train, in turn at every distance. `bytes_16` is what a rank of sixteen sends for an average, in
bytes for each parameter, with a sixteenth of the elements, and `bytes_16_default` with signs, both by the formula that
a test compares with what the kernel counts.

Of sixteen hosts' time, of unequal hosts and of the clock, see experiments/figures.py, bench/unequal.py and
experiments/clock.py.
"""

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from cases import COMPARED, MEASURED
from kept import Points, seconds_to
from runs import Record, on_hosts, on_one_host, saved_loss

from adloco_dist.config.compose import compose
from adloco_dist.setup.scale import Traffic
from common import parse, report
from helpers.hosts import Wan, why_not_far

DELAYS_MS = (0, 25, 75)
"""One way."""
SECONDS = 150
"""Of one host alone."""
SHARES = (0.5, 0.7)
"""Of the seconds of one alone, which two have."""
MARGIN_SECONDS = 300
"""For what a run does before and after its budget."""
HOSTS, PARAMETERS = 16, 1 << 24
"""Of the average whose bytes are counted."""
WARM = 0.1
"""Share of a run that is not counted: the first rounds find their length."""


Rounds = tuple[float, float, float, float]
"""Of the time of a run's ranks: the share that they do not spend in updates, and that which they wait; the seconds of a
round that are not spent in updates, and the mean H."""


def overrides_of(seconds: float, seed: int) -> Sequence[str]:
    """The default settings, on sequences that no setting was chosen by."""
    return (*MEASURED, COMPARED[0], "model=tiny", f"budget={seconds:g}seconds", f"seed={seed}")


def rounds_of(rows: list[Record]) -> Rounds:
    """What the rounds of a run look like."""
    rounds = [row for row in rows if row["round"]]
    first, *counted = rounds[int(WARM * len(rounds)) :]
    elapsed = counted[-1]["elapsed_seconds"] - first["elapsed_seconds"]
    of_ranks = [rank for row in counted for rank in row["rank_seconds"].values()]
    inner, waited = (
        len(counted) * statistics.mean(sum(rank.get(step, 0.0) for step in steps) for rank in of_ranks)
        for steps in (("inner",), ("wait", "control"))
    )
    length = statistics.mean(row["updates"] for row in counted)
    return 1 - inner / elapsed, waited / elapsed, (elapsed - inner) / len(counted), length


def two_hosts(delay_ms: int, seconds: float, seed: int) -> tuple[Rounds, Points]:
    """What rounds of the longest run look like, and the losses to which runs of both lengths come."""
    points: Points = []
    rows: list[Record] = []
    for share in SHARES:
        budget = share * seconds
        wan = Wan(delay_ms=delay_ms, rate_mbit=10)
        rows, facts = on_hosts(2, overrides_of(budget, seed), wan, budget + MARGIN_SECONDS)
        points.append((budget, saved_loss(facts["result"])))
    return rounds_of(rows), points


def bytes_of_sixteen(*overrides: str) -> float:
    """What a rank of sixteen hosts sends for an average, in bytes for each parameter."""
    sent = Traffic(compose(overrides), PARAMETERS, range(HOSTS)).of_rank(range(HOSTS))
    return sent / PARAMETERS


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13], help="an even number of them")
    options = parser.parse_args()
    if reason := why_not_far():
        sys.exit(f"no hosts far from each other on this machine: {reason}")
    seconds, seeds = (50, options.seeds[:2]) if options.quick else (SECONDS, options.seeds)
    targets: list[float] = []
    found = {delay: list[tuple[Rounds, Points]]() for delay in DELAYS_MS}
    for pair in zip(seeds[::2], seeds[1::2], strict=True):
        with ThreadPoolExecutor(2) as threads:
            alone = threads.map(lambda seed: on_one_host(overrides_of(seconds, seed)), pair)
            targets += [saved_loss(facts["result"]) for facts in alone]
        for seed in pair:
            for delay in DELAYS_MS:
                found[delay].append(two_hosts(delay, seconds, seed))
    near, *_, far = DELAYS_MS
    measured = {delay: [*zip(*(rounds for rounds, _ in runs), strict=True)] for delay, runs in found.items()}
    middle = {delay: [statistics.median(values) for values in columns] for delay, columns in measured.items()}
    figures = {f"exposed_far_{delay}": middle[delay][0] for delay in DELAYS_MS}
    figures |= {f"waiting_far_{delay}": middle[delay][1] for delay in DELAYS_MS}
    figures |= {
        "bytes_16": bytes_of_sixteen("wire=sparse", "wire.fraction=0.0625"),
        "bytes_16_default": bytes_of_sixteen(),
    }
    figures["blocked_trips"] = (middle[far][2] - middle[near][2]) / (2 * (far - near) * 1e-3)
    rows = [["one alone", *[""] * 5, *_spread(targets), ""]]
    for delay, runs in found.items():
        points = [points for _, points in runs]
        ends = [ends[-1][1] for ends in points]
        worth = [seconds_to(loss, ours) / seconds for loss, ours in zip(targets, points, strict=True)]
        over_near = [
            seconds_to(nearest[-1][1], ours) / nearest[-1][0]
            for (_, nearest), ours in zip(found[near], points, strict=True)
        ]
        figures[f"second_machine_far_{delay}"] = statistics.median(worth)
        figures[f"far_over_near_{delay}"] = statistics.median(over_near)
        both = [f"{min(values):.3f} to {max(values):.3f}" for values in (over_near, worth)]
        of_rounds = [
            f"{median:.3f} ({min(values):.3f} to {max(values):.3f})"
            for median, values in zip(middle[delay], measured[delay], strict=True)
        ]
        rows.append([f"{delay} ms", *of_rounds, both[0], *_spread(ends), both[1]])
    columns = ["one way", "not in updates", "waiting", "s of a round", "H", "far over near", "loss", "least", "most",
               "time over one alone's"]  # fmt: skip
    report(f"tiny at 10 Mbit/s, medians of {len(seeds)} seeds", columns, rows, figures, options.json)


def _spread(losses: list[float]) -> list[str]:
    return [f"{value:.4f}" for value in (statistics.median(losses), min(losses), max(losses))]


if __name__ == "__main__":
    main()
