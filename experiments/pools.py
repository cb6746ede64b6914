"""Does a pool of trainers at different rates, halved early, find the rate while it trains, at no cost?

Four hosts, `nano`, on sequences that no setting was chosen by. The controls are one trainer of all hosts at each of the
rates, the best of which nobody knows beforehand, and at the default's.
"""

from pathlib import Path

from cases import COMPARED, NANO_SHARE, Case, cases, link, on_clock

SEEDS = (10,)
FACTORS = (0.25, 0.63, 1.59, 4.0)
"""Of the rates, over the one that the width of `nano` says."""
RATE = 7e-3
HOSTS = len(FACTORS)
PLACES = {"100": link("100", NANO_SHARE), "10_25ms": (*link("10", NANO_SHARE), "simulation.latency_seconds=0.025")}
LENGTHS = (60, 180)
"""Seconds."""
HALVED = (f"pool.trainers={HOSTS}", f"pool.rates=[{FACTORS[0]},{FACTORS[-1]}]", "merge=halving")


def pools(_: Path | None) -> list[Case]:
    """What does a run lose that has to find its rate?"""
    found = []
    for place, over in PLACES.items():
        base = ("model=nano", *COMPARED, *on_clock("muon"), *over)
        for seconds in LENGTHS:
            found += cases("pools", f"halved_{place}", HOSTS, (*base, *HALVED), (seconds,), SEEDS)
            found += cases("pools", f"default_{place}", HOSTS, base, (seconds,), SEEDS)
            for factor in FACTORS:
                rate = f"inner.lr={RATE * factor:.3g}"
                found += cases("pools", f"one_{factor:g}_{place}", HOSTS, (*base, rate), (seconds,), SEEDS)
    return found
