"""Are trainers that merge as good as one trainer of as many workers from the start, in runs of any length?

Four hosts, `nano`, on sequences that no setting was chosen by, with all else the default's.
"""

from itertools import product
from pathlib import Path

from cases import COMPARED, NANO_SHARE, Case, cases, link, on_clock

SEEDS = (10, 11)
HOSTS = 4
MERGED_BY = {"a_tenth": 0.1, "a_quarter": 0.25}
"""Shares of a run by which four trainers have become one, roughly."""
MERGED_POLICIES = ("worst_with_worst", "worst_loss_with_best")
ROUNDS_PER_SECOND = 2.2
"""Of trainers of one worker each."""
MERGED_LENGTHS = {45: (36, 45, 54), 180: (144, 180), 450: (360, 450)}
"""Seconds of pools, and of one trainer beside them: it comes to their losses earlier or later."""


def merged(_: Path | None) -> list[Case]:
    """Pools that merge by a tenth and by a quarter of a run, by two policies, and one trainer beside them."""
    base = ("model=nano", *COMPARED, *on_clock("muon"), *link("10", NANO_SHARE))
    found = []
    for seconds, beside in MERGED_LENGTHS.items():
        seeds = SEEDS if seconds < max(MERGED_LENGTHS) else SEEDS[:1]
        found += cases("merged", "one_trainer", HOSTS, base, beside, seeds)
        for (name, share), policy in product(MERGED_BY.items(), MERGED_POLICIES):
            every = round(share * seconds * ROUNDS_PER_SECOND / (HOSTS - 1))
            pool = (f"pool.trainers={HOSTS}", f"merge={policy}", f"merge.every_rounds={every}")
            found += cases("merged", f"{policy}_by_{name}", HOSTS, (*base, *pool), (seconds,), seeds)
    return found
