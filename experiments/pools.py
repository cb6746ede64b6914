"""Does a pool of trainers at different rates, halved early, find the rate while it trains, at no cost?

Four hosts, `nano`, on sequences that no setting was chosen by. The controls are one trainer of all hosts at each of the
rates, the best of which nobody knows beforehand, and at the default's.
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
