"""Two hosts with `tiny`, one of which another process slows down: what the fast one loses by it.

Needs root: hosts are network namespaces, each with a core of its own, and a busy process shares that of the second.
Nothing else may run. `idle_unequal_default` is the share of the fast host's time that it waits at 10 Mbit/s, with
nothing set; `idle_unequal_updates` the same where both take as many updates. `idle_while_slowed` is that of the time in
which the process runs, where it runs for a while only, and `idle_before` that of the time before it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common import parse, report, spread
from helpers.hosts import why_unavailable
from wire import SHARED, Figures, Record, Rows, on_core, rounds_on_hosts

CHOSEN = ("algorithm", "algorithm.updates_per_round", "batching.request", "batching.local_batch")
DEFAULT = tuple(word for word in SHARED if word.split("=")[0] not in CHOSEN)
"""With the default's algorithm and batches."""
FAST, SLOW = 0, 1
"""Ranks."""
LONGER = 1.4
"""An update of the slow host that takes more than so many of the fast one's was slowed down."""


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    if reason := why_unavailable():
        sys.exit(f"no hosts on this machine: {reason}")
    figures: Figures = {}
    rows: Rows = []
    for part in (always, for_a_while):
        found, more = part(options.quick)
        figures |= found
        rows += more
    report("a slow host beside a fast one", ("share", "min", "median", "max"), rows, figures, options.json)


def always(quick: bool) -> tuple[Figures, Rows]:
    """How long a rank waits for one of half its speed: with nothing set, and where both take as many updates."""
    figures: Figures = {}
    rows: Rows = []
    equal = ["algorithm.updates_per_round=50"]
    sides = {"default": ("10mbit", 100, 300, DEFAULT, []), "updates": ("100mbit", 3, 10, SHARED, equal)}
    for name, (link, few, many, shared, overrides) in sides.items():
        with _busy():
            records = rounds_on_hosts(link, 2, ["model=tiny", *overrides], few if quick else many, shared)
        counted = records[len(records) // 4 :]  # the first ones find their length
        figures[f"idle_unequal_{name}"], shares = _idle(counted)
        rows.append([f"{name}: of a round that the fast host waits", *spread(shares)])
        slow, fast = (sum(record["worker_updates"][rank] for record in counted) for rank in (SLOW, FAST))
        figures[f"slow_updates_{name}"] = slow / fast
    return figures, rows


def for_a_while(quick: bool) -> tuple[Figures, Rows]:
    """What the fast host loses while the other is slow: a process runs on its core for a third of the run."""
    rounds, begins_after, lasts = (160, 25, 15) if quick else (400, 40, 30)
    with _busy(begins_after, lasts):
        records = rounds_on_hosts("10mbit", 2, ["model=tiny"], rounds, DEFAULT)
    is_slowed = [_update_seconds(record, SLOW) > LONGER * _update_seconds(record, FAST) for record in records]
    # The process runs as long as most of some rounds in a row are slowed down; single ones are by something else.
    near = [sum(is_slowed[max(0, place - 2) : place + 3]) >= 3 for place in range(len(records))]
    first, last = near.index(True), len(near) - near[::-1].index(True)
    before, meanwhile = records[first // 2 : first], records[first:last]
    figures: Figures = {}
    rows: Rows = []
    for name, counted in (("before", before), ("while_slowed", meanwhile)):
        figures[f"idle_{name}"], shares = _idle(counted)
        rows.append([f"{name}, {len(counted)} rounds: of a round that the fast host waits", *spread(shares)])
    return figures, rows


@contextmanager
def _busy(begins_after: float = 0, lasts: float = 3600) -> Iterator[None]:
    """A process on the core of the second host, which leaves it half of its speed."""
    spins = [sys.executable, "-c", "while True: pass"]
    script = f'sleep {begins_after}; exec timeout --foreground {lasts} {" ".join(on_core(SLOW))} "$@"'
    process = subprocess.Popen(["sh", "-c", script, "sh", *spins], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _idle(records: Sequence[Record]) -> tuple[float, list[float]]:
    """The share of the fast host's time that it waits, of all rounds together and of each."""
    waited, seconds = zip(*(_waited(record["rank_seconds"]) for record in records), strict=True)
    return sum(waited) / sum(seconds), [one / whole for one, whole in zip(waited, seconds, strict=True)]


def _waited(of_ranks: dict[str, dict[str, float]]) -> tuple[float, float]:
    """Of the seconds of two ranks in a round: how long the fast one waited, and its whole round."""
    fast, slow = of_ranks[str(FAST)], of_ranks[str(SLOW)]
    # Without a delay both enter the same average, and the slow one waits for nothing in it but the link.
    waited = fast["wait"] if "wait" in fast else fast["outer"] - slow["outer"]
    return waited + fast["control"], fast["inner"] + fast["outer"] + fast["control"]


def _update_seconds(record: Record, rank: int) -> float:
    return record["rank_seconds"][str(rank)]["inner"] / record["worker_updates"][rank]


if __name__ == "__main__":
    main()
