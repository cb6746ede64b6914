"""What pools of trainers are worth: four hosts, `nano`, on sequences that no setting was chosen by.

Does a pool of trainers at different rates, halved early, find the rate while it trains, at no cost? Its controls are
one trainer of all hosts at each of the rates, the best of which nobody knows beforehand, and at the default's. And are
trainers that merge as good as one trainer of as many workers, with all else the default's?
"""

from itertools import product
from pathlib import Path

from cases import COMPARED, NANO_SHARE, Case, cases, link, on_clock

SEEDS = (10, 11)
FACTORS = (0.25, 0.63, 1.59, 4.0)
"""Of the rates, over the default's."""
RATES = {"muon": 1e-2, "adamw": 1e-3}
"""The default's: with Muon the one that the width of `nano` says, with AdamW that of every model."""
HOSTS = len(FACTORS)
PLACES = {"100": link("100", NANO_SHARE), "10_25ms": (*link("10", NANO_SHARE), "simulation.latency_seconds=0.025")}
LENGTHS = (60, 180)
"""Seconds."""
HALVED = (f"pool.trainers={HOSTS}", f"pool.rates=[{FACTORS[0]},{FACTORS[-1]}]", "merge=halving")
MERGED_BY = {"a_tenth": 0.1, "a_quarter": 0.25}
"""Shares of a run by which four trainers have become one, roughly."""
ROUNDS_PER_SECOND = 2.2
"""Of trainers of one worker each."""
MERGED_LENGTHS = {45: (36, 45, 54), 180: (144, 180), 450: (360, 450)}
"""Seconds of pools, and of one trainer beside them: it comes to their losses earlier or later."""


def pools(_: Path | None) -> list[Case]:
    """What does a run lose that has to find its rate?"""
    found = []
    for (optimizer, rate), (place, over), seconds in product(RATES.items(), PLACES.items(), LENGTHS):
        base = ("model=nano", *COMPARED, *on_clock(optimizer), *over)
        sides = {"halved": HALVED, "default": ()}
        sides |= {f"one_{factor:g}": (f"inner.lr={rate * factor:.3g}",) for factor in FACTORS}
        for side, differs in sides.items():
            found += cases("pools", f"{optimizer}_{side}_{place}", HOSTS, (*base, *differs), (seconds,), SEEDS)
    return found


def merged(_: Path | None) -> list[Case]:
    """Are trainers that merge as good as one trainer of as many workers from the start, in runs of any length?"""
    base = ("model=nano", *COMPARED, *on_clock("muon"), *link("10", NANO_SHARE))
    found = []
    for seconds, beside in MERGED_LENGTHS.items():
        seeds = SEEDS if seconds < max(MERGED_LENGTHS) else SEEDS[:1]
        found += cases("merged", "one_trainer", HOSTS, base, beside, seeds)
        for (name, share), policy in product(MERGED_BY.items(), ("worst_with_worst", "worst_loss_with_best")):
            every = round(share * seconds * ROUNDS_PER_SECOND / (HOSTS - 1))
            pool = (f"pool.trainers={HOSTS}", f"merge={policy}", f"merge.every_rounds={every}")
            found += cases("merged", f"{policy}_by_{name}", HOSTS, (*base, *pool), (seconds,), seeds)
    return found
