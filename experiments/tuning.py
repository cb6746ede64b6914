"""The search for settings of one machine alone and of two, with one seed, on sequences that only it has seen."""

from collections.abc import Mapping
from pathlib import Path

from cases import Case, cases, link, on_clock

SEED = 100
COSINE = ("inner.schedule=cosine", "outer.average_span=null")
ALONE = ("algorithm=localsgd", "batching.request=none")
AVERAGED = ("inner.schedule=constant", "outer.average_span=0.05")
"""A constant rate, and an average of weights over 5 % of the run."""
FOUND = "inner.lr=3.5e-3"
"""What the default took for `tiny` before its rate decayed at the end."""
DECAYED = ("inner.schedule=wsd", "outer.average_span=0.1")
"""A rate that decays at the end, as the default's."""
SHORT = {
    "lr": "inner.lr", "wd": "inner.weight_decay", "m": "inner.momentum", "b": "batching.local_batch",
    "wu": "inner.warmup_fraction", "beta1": "inner.beta1", "beta2": "inner.beta2", "other": "inner.other_lr_factor",
    "request": "batching.request", "wire": "wire", "fraction": "wire.fraction", "delay": "wire.delay_updates",
    "H": "algorithm.updates_per_round", "span": "outer.average_span",
}  # fmt: skip
"""What stands in the names of sides."""
ADAMW_ALONE = (
    "cosine lr=2e-3 wu=0.2", "cosine lr=2e-3 wu=0.2 wd=0", "cosine lr=3e-3 wu=0.2 wd=0", "lr=2e-3 wu=0.1 wd=0",
    "lr=1e-3 wu=0.2 wd=0", "lr=1e-3 wu=0.2 wd=0 beta2=0.99", "lr=1e-3 wu=0.2 wd=0 beta1=0.8",
    "lr=1.4e-3 wu=0.2 wd=0 beta1=0.8 b=8", "wsd lr=1.4e-3 wu=0.2 wd=0 beta1=0.8 b=8",
    "wsd lr=2e-3 wu=0.2 wd=0 beta1=0.8 b=8", "wsd lr=2.8e-3 wu=0.2 wd=0 beta1=0.8 b=8",
    "wsd lr=1.4e-3 wu=0.4 wd=0 beta1=0.8 b=8", "wsd lr=1.4e-3 wu=0.05 wd=0 beta1=0.8 b=8",
    "wsd lr=1.4e-3 wu=0.2 wd=0 beta1=0.8 b=16", "wsd lr=1.4e-3 wu=0.2 wd=0 beta1=0.8 b=8 beta2=0.995",
    "wsd lr=5e-4 wu=0.2 wd=0 beta1=0.8 b=8", "wsd lr=4e-3 wu=0.2 wd=0 beta1=0.8 b=8",
    "wsd lr=8e-3 wu=0.2 wd=0 beta1=0.8 b=8", "wsd lr=1.4e-3 wu=0.2 wd=0 beta1=0.8 b=2",
)  # fmt: skip
MUON_ALONE = (
    "lr=3e-3 m=0.95 wd=0.1", "lr=3e-3 m=0.9 wd=0", "lr=5e-3 m=0.9 wd=0", "lr=5e-3 m=0.95 wd=0 b=8",
    "lr=5e-3 m=0.9 wd=0 b=8", "lr=5e-3 m=0.9 wd=0.01 b=8", "lr=5e-3 m=0.8 wd=0 b=8", "lr=5e-3 m=0.8 wd=0.01 b=8",
    "lr=5e-3 m=0.7 wd=0 b=8", "lr=8e-3 m=0.8 wd=0 b=8", "lr=5e-3 m=0.8 wd=0 b=8 other=0.5",
    "lr=5e-3 m=0.8 wd=0 b=8 other=2", "lr=5e-3 m=0.9 wd=0 b=16", "lr=5e-3 m=0.8 wd=0 b=16", "lr=8e-3 m=0.8 wd=0 b=16",
    "lr=8e-3 m=0.8 wd=0 b=32", "wsd lr=5e-3 m=0.8 wd=0 b=16", "wsd lr=8e-3 m=0.8 wd=0 b=16",
    "wsd lr=3.5e-3 m=0.8 wd=0 b=16", "wsd lr=5e-3 m=0.8 wd=0 b=8", "wsd lr=5e-3 m=0.8 wd=0 b=16 wu=0.05",
    "wsd lr=5e-3 m=0.8 wd=0 b=16 wu=0.2", "wsd lr=5e-3 m=0.8 wd=0 b=16 wu=0.4",
    "wsd lr=5e-3 m=0.8 wd=0 b=16 beta2=0.99", "wsd lr=5e-3 m=0.8 wd=0 b=24", "wsd lr=2e-3 m=0.8 wd=0 b=16",
    "wsd lr=5e-3 m=0.8 wd=0 b=2",
)  # fmt: skip
MUON_TWO = (
    "lr=5e-3 m=0.8 wd=0 request=progress", "lr=5e-3 m=0.8 wd=0 b=8", "lr=8e-3 m=0.8 wd=0 b=8",
    "lr=5e-3 m=0.8 wd=0 b=16",
)  # fmt: skip
"""Two hosts at 10 Mbit/s, with the default's rounds and wire."""
DEFAULT_ALONE = (
    "H=25 lr=5e-3", "H=25 lr=7e-3", "H=25 lr=5e-3 b=8", "H=2", "H=3", "H=5", "H=8", "H=12", "H=25",
    "H=8 lr=5e-3", "H=8 lr=7e-3", "H=8 span=0.03", "H=8 span=0.1", "H=8 span=0.2",
    "H=8 span=0.1 lr=5e-3",
)  # fmt: skip
"""The default on one host: batches by progress per second, which leave the rate as it is."""
MANY = {
    "eight 100": (8, 42, ("",)),
    "two 100": (2, 75, ("", "span=0.1")),
    "two 10": (2, 75, ("", "span=0.1", "span=0.2", "span=0.1 lr=5e-3")),
}
"""The default on further hosts, by link: ranks, seconds and what differs from it."""


def overrides_of(side: str) -> tuple[str, ...]:
    """The overrides that a side's words stand for."""
    words = side.split()
    named = [word.split("=") for word in words if "=" in word]
    schedule = COSINE if "cosine" in words else DECAYED if "wsd" in words else AVERAGED
    return (*schedule, *(f"{SHORT[name]}={value}" for name, value in named))


def tuning(_: Path | None) -> list[Case]:
    """Which settings suit AdamW and Muon best, alone in 150 s and on two hosts in 75 s?"""
    alone: Mapping[str, tuple[str, ...]] = {"adamw": ADAMW_ALONE, "muon": MUON_ALONE}
    found = []
    for optimizer, sides in alone.items():
        for side in sides:
            chosen = ("model=tiny", *ALONE, *on_clock(optimizer), "inner.warmup_fraction=0.1", *overrides_of(side))
            found += cases("tuning", f"alone {optimizer} {side}".replace(" ", "_"), 1, chosen, (150,), (SEED,))
    for side in DEFAULT_ALONE:
        chosen = ("model=tiny", *on_clock("muon"), FOUND, *overrides_of(side))
        found += cases("tuning", f"default muon {side}".replace(" ", "_"), 1, chosen, (150,), (SEED,))
    for side in MUON_TWO:
        chosen = ("model=tiny", *on_clock("muon"), *link("10"), "batching.request=none", *overrides_of(side))
        found += cases("tuning", f"two muon {side}".replace(" ", "_"), 2, chosen, (75,), (SEED,))
    for place, (ranks, seconds, sides) in MANY.items():
        for side in sides:
            chosen = ("model=tiny", *on_clock("muon"), *link(place.split()[1]), FOUND, *overrides_of(side))
            found += cases(
                "tuning", f"{place} muon {side}".strip().replace(" ", "_"), ranks, chosen, (seconds,), (SEED,)
            )
    return found
