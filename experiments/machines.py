"""What Muon and further machines are worth: runs on sequences that no setting was chosen by, with seeds that none was.

The settings of both sides come from one search (`tuning` in questions.py), on other validation sequences.
"""

from pathlib import Path

from cases import COMPARED, Case, cases, link, on_clock

SEEDS = (10, 11, 12, 13, 14)
SECONDS = 150
"""Of one machine alone."""
BASE = ("model=tiny", *COMPARED)
ALONE = ("algorithm=localsgd", "batching.request=none", "inner.schedule=constant", "outer.average_span=0.05")
"""One worker that averages with nobody, at a constant rate with an average of its weights."""
ADAMW = (
    *on_clock("adamw"), "inner.lr=1.4e-3", "inner.weight_decay=0", "inner.beta1=0.8", "inner.warmup_fraction=0.2",
    "batching.local_batch=8",
)  # fmt: skip
MUON = (*on_clock("muon"), "inner.lr=5e-3", "inner.weight_decay=0", "inner.momentum=0.8", "batching.local_batch=16")
"""Each at the best of its settings in the search."""
BEFORE = (*on_clock("adamw"), "inner.lr=2e-3")
"""The default until Muon was: its own rate was 1e-3, and this one is better."""
SIDES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "alone_adamw": (1, SECONDS, (*ALONE, *ADAMW)),
    "alone_muon": (1, SECONDS, (*ALONE, *MUON)),
    "default_alone_before": (1, SECONDS, BEFORE),
    "default_alone": (1, SECONDS, on_clock("muon")),
    "two_10_before": (2, 90, (*BEFORE, *link("10"))),
    "two_10": (2, 105, (*on_clock("muon"), *link("10"))),
    "two_100": (2, 105, (*on_clock("muon"), *link("100"))),
    "four_100": (4, 65, (*on_clock("muon"), *link("100"))),
    "eight_100": (8, 42, (*on_clock("muon"), *link("100"))),
}
"""Ranks, seconds, and what differs."""
TARGETS = {
    "second_machine_10mbit": ("two_10", "alone_muon"),
    "second_machine_100mbit": ("two_100", "alone_muon"),
    "four_machines_100mbit": ("four_100", "alone_muon"),
    "eight_hosts_100mbit": ("eight_100", "alone_muon"),
    "default_over_adamw_10mbit": ("two_10", "two_10_before"),
    "default_over_adamw_alone": ("default_alone", "default_alone_before"),
}
"""By figure: the time of the first side to the loss that the second has at its end, over that side's time."""


def machines(_: Path | None) -> list[Case]:
    """What are Muon, a second, four and eight machines worth, beside one alone at its best in 150 s?"""
    return [
        case
        for seed in SEEDS
        for side, (ranks, seconds, overrides) in SIDES.items()
        for case in cases("machines", side, ranks, (*BASE, *overrides), (seconds,), (seed,))
    ]
