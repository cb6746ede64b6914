"""What else is asked of the default: published methods on the same link, other text, other lengths, constant batches,
and rounds of fixed lengths; on `nano`, a seventh of `tiny`, on the same clock, with sequences that no setting was
chosen by.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from cases import COMPARED, NANO_SHARE, Case, cases, corpora, link, on_clock
from machines import ADAMW, ALONE, MUON

PLACE = ("model=nano", *COMPARED)
SLOW = link("10", NANO_SHARE)
FURTHER_SEEDS = (10,)
SECONDS = 90
"""Of published methods on two hosts."""
ROUNDS_OF_30 = "algorithm.updates_per_round=30"
"""H of SparseLoCo and MuLoCo as published."""
STREAMED = ("algorithm.updates_per_round=40", "wire=slow_link")
"""Streaming DiLoCo: four fragments in 4 bits, each of which travels for five updates."""
PUBLISHED: Mapping[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "SparseLoCo": (
        ("algorithm=diloco", "outer=average", "wire=sparse", ROUNDS_OF_30),
        "adamw",
        ("1e-3", "2e-3", "4e-3"),
    ),
    "MuLoCo": (("experiment=muloco", "wire=int4"), "muon", ("2.5e-3", "5e-3", "1e-2")),
    "streaming_DiLoCo": (("algorithm=diloco", *STREAMED), "adamw", ("5e-4", "1e-3", "2e-3")),
    "streaming_MuLoCo": (("experiment=muloco", *STREAMED), "muon", ("2.5e-3", "5e-3", "1e-2")),
}
"""By method: its settings, its optimizer, and the rates that were tried."""
LENGTHS = (50, 150, 450)
"""Seconds of one alone; two have 0.7 of them."""
HALF = 0.7
CONSTANTS = (4, 8, 16)
CONSTANT_RATES = ("3.5e-3", "5e-3")
ADAMW_OF_NANO = ("inner.lr=2.8e-3", *(setting for setting in ADAMW if not setting.startswith("inner.lr=")))
"""What the search found for `tiny`, at twice the rate, as `nano` has in all questions."""
EVALUATED = COMPARED[1:]
"""Ten times in a run, on held-out text that no setting was chosen by."""
ROUNDS = (2, 10, 25)
"""H."""


def published(_: Path | None) -> list[Case]:
    """How long does the default need for what published methods reach at 10 Mbit/s, at the best of three rates?"""
    found = [*cases("published", "default", 2, (*PLACE, *on_clock("muon"), *SLOW), (SECONDS,), FURTHER_SEEDS)]
    for name, (method, optimizer, rates) in PUBLISHED.items():
        for rate in rates:
            side = (*PLACE, *method, *on_clock(optimizer), *SLOW, f"inner.lr={rate}")
            found += cases("published", f"{name}_{rate}", 2, side, (SECONDS,), FURTHER_SEEDS)
    return found


def texts(wikitext: Path | None) -> list[Case]:
    """Is Muon ahead of AdamW, and does a second machine pay, on other text, too?"""
    sides = {
        "alone_adamw": (1, 150, (*ALONE, *ADAMW_OF_NANO)),
        "alone_muon": (1, 150, (*ALONE, *MUON)),
        "default_alone": (1, 150, on_clock("muon")),
        "two_10": (2, 105, (*on_clock("muon"), *SLOW)),
    }
    found = []
    for name, data in corpora(wikitext).items():
        for side, (ranks, seconds, overrides) in sides.items():
            chosen = ("model=nano", *EVALUATED, *data, *overrides)
            found += cases("texts", f"{side}_{name}", ranks, chosen, (seconds,), FURTHER_SEEDS)
    return found


def lengths(_: Path | None) -> list[Case]:
    """What is a second machine worth in shorter and in longer runs?"""
    found = []
    for seconds in LENGTHS:
        found += cases("lengths", "alone", 1, (*PLACE, *on_clock("muon")), (seconds,), FURTHER_SEEDS)
        for name in ("10", "100"):
            two = (*PLACE, *on_clock("muon"), *link(name, NANO_SHARE))
            found += cases("lengths", f"two_{name}", 2, two, (HALF * seconds,), FURTHER_SEEDS)
    return found


def constants(_: Path | None) -> list[Case]:
    """Do batches by progress per second do as well as the best constant one? One alone, where nothing else differs."""
    place = (*PLACE, *on_clock("muon"))
    found = [*cases("constants", "default", 1, place, (150,), (10, 11))]
    for batch, rate in product(CONSTANTS, CONSTANT_RATES):
        side = (*place, "batching.request=none", f"batching.local_batch={batch}", f"inner.lr={rate}")
        found += cases("constants", f"constant_{batch}_{rate}", 1, side, (150,), (10, 11))
    return found


def apart(_: Path | None) -> list[Case]:
    """What do longer rounds cost, in runs of what length? Everything travels, and takes no time."""
    found = []
    for seconds in (LENGTHS[0], LENGTHS[-1]):
        for updates in ROUNDS:
            side = (*PLACE, *on_clock("muon"), "wire=fp32", "batching.request=none", "batching.local_batch=8",
                    "algorithm.round=updates", f"algorithm.updates_per_round={updates}", "inner.lr=5e-3",
                    "inner.lr_scaling=none")  # fmt: skip
            found += cases("apart", f"H{updates}", 2, side, (HALF * seconds,), FURTHER_SEEDS[:1])
    return found
