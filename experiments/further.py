"""What else is asked of the default: published methods on the same link, other text, other lengths, of runs and of
rounds.

On `nano`, a seventh of `tiny`, on the same clock, with sequences that no setting was chosen by.

With AdamW, and with a constant batch, `nano` has twice the rates of `tiny` in all questions, which are nearer to its
best. The default finds its own.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from cases import COMPARED, NANO_SHARE, Case, cases, corpora, link, on_clock
from machines import SIDES, overrides_of
from shapes import shape_of

PLACE = ("model=nano", *COMPARED)
SLOW = link("10", NANO_SHARE)
FURTHER_SEEDS = (10,)
SECONDS = 90
"""Of published methods on two hosts."""
ROUNDS_OF_30 = "algorithm.updates_per_round=30"
"""H of SparseLoCo and MuLoCo as published."""
STREAMED = ("algorithm.updates_per_round=40", "wire=slow_link")
"""Streaming DiLoCo: four fragments in 4 bits, each of which travels for five updates."""
AVERAGED = ("inner.schedule=wsd", "outer.average_span=0.1")
"""The default's course of the rate, and its average of anchors."""
PUBLISHED: Mapping[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "default": ((), "muon", ("7e-3", "1e-2", "1.4e-2")),
    "SparseLoCo": (
        ("algorithm=diloco", "outer=average", "wire=sparse", ROUNDS_OF_30),
        "adamw",
        ("2e-3", "4e-3", "8e-3"),
    ),
    "MuLoCo": (("experiment=muloco", "wire=int4"), "muon", ("5e-3", "1e-2", "2e-2")),
    "MuLoCo_averaged": (("experiment=muloco", "wire=int4", *AVERAGED), "muon", ("7e-3", "1e-2", "1.4e-2")),
    "streaming_DiLoCo": (("algorithm=diloco", *STREAMED), "adamw", ("1e-3", "2e-3", "4e-3")),
    "streaming_MuLoCo": (("experiment=muloco", *STREAMED), "muon", ("5e-3", "1e-2", "2e-2")),
    "streaming_MuLoCo_averaged": (("experiment=muloco", *STREAMED, *AVERAGED), "muon", ("7e-3", "1e-2", "1.4e-2")),
}
"""By method, the default among them: its settings, its optimizer, and the rates that were tried. As published they have
a cosine and no average of anchors; averaged: with AVERAGED instead."""
OUTER_STEPS = {
    "int4": ("wire=int4",), "momentum": ("wire=int4", "outer.momentum=0.6", "outer.lr=0.7"), "int8": ("wire=int8",),
}  # fmt: skip
"""By name, what differs from the default, which sends 4 bits there with a residual that an outer momentum would count
twice: MuLoCo's momentum, and twice the bits."""
MANY_HOSTS = {2: 60, 4: 40, 8: 28}
"""By hosts: seconds."""
AT_OTHER_RATE = ("default_alone", "alone_muon")
OTHER_RATE = "7e-3"
"""Of the default and of the constant batch, which have 1e-2: what of a difference is the rate's?"""
LENGTHS = (50, 150, 450)
"""Seconds of one alone; two have `HALF`, or `LONGER`, of them."""
HALF, LONGER = 0.66, 0.72
"""Little more than two hosts need: as the rate decays at the end of a run, one that goes on for long comes late to what
it could have had sooner. Longer ones are for those that do not come to it."""
SIZES = ((128, 4, 824_576, 75), (256, 4, 3_230_208, 290), (128, 4, 824_576, 370))
"""Width, depth, parameters, and the seconds of one alone, in which it sees about a token for each of them, or five as
`nano` does in the shortest of LENGTHS; two have `HALF` of them."""
ROUNDS = (2, 5, 10, 25, 50, 100)
"""H, the updates that two workers take between averages which cost nothing."""
LENGTHS_IN_UPDATES = (400, 1200, 3600)
APART = (
    "algorithm=localsgd", "batching.request=none", "outer.average_span=0.05", *on_clock("muon"),
    "inner.schedule=constant", "inner.lr=7e-3",
)  # fmt: skip
"""Workers that do nothing but drift apart, at a rate that does not decay."""
TOKENS_IN_UPDATE = 2 * 4 * 128
"""Of both workers."""
FORMATS = ("fp32", "sparse")
DELAYS = {
    "fp32": {2: (1,), 4: (1, 3), 10: (1, 4, 9), 25: (4, 12, 24)},
    "signs": {2: (1,), 10: (0, 4, 9), 25: (0,)},
}
"""By format and H: the delays that were tried, in updates."""
DELAYED_UPDATES = 1200
EVALUATED = COMPARED[1:]
"""Ten times in a run, on held-out text that no setting was chosen by."""


def published(_: Path | None) -> list[Case]:
    """How long does the default need for what published methods reach at 10 Mbit/s, all at the best of three rates?"""
    found = []
    for name, (method, optimizer, rates) in PUBLISHED.items():
        for rate in rates:
            side = (*PLACE, *method, *on_clock(optimizer), *SLOW, f"inner.lr={rate}")
            found += cases("published", f"{name}_{rate}", 2, side, (SECONDS,), FURTHER_SEEDS)
    return found


def outer_steps(_: Path | None) -> list[Case]:
    """Does MuLoCo's outer momentum, or twice the bits, help the default's short rounds on 2, 4 and 8 hosts?"""
    found = []
    for (hosts, seconds), (name, differs) in product(MANY_HOSTS.items(), OUTER_STEPS.items()):
        chosen = (*PLACE, *on_clock("muon"), *link("100", NANO_SHARE), *differs)
        found += cases("outer_steps", f"{hosts}_{name}", hosts, chosen, (seconds,), FURTHER_SEEDS)
    return found


def texts(wikitext: Path | None) -> list[Case]:
    """Is Muon ahead of AdamW, and does a second machine pay, on other text, too?"""
    found = []
    for name, data in corpora(wikitext).items():
        for side in ("alone_adamw", "alone_muon", "default_alone", "two_10"):
            ranks = SIDES[side][0]
            seconds = LENGTHS[1] * (HALF if ranks == 2 else 1)
            chosen = ("model=nano", *EVALUATED, *data, *overrides_of(side, "nano"))
            found += cases("texts", f"{side}_{name}", ranks, chosen, (seconds,), FURTHER_SEEDS)
            if side in AT_OTHER_RATE:
                chosen = (*chosen, f"inner.lr={OTHER_RATE}")
                found += cases("texts", f"{side}_{OTHER_RATE}_{name}", ranks, chosen, (seconds,), FURTHER_SEEDS)
    return found


def lengths(_: Path | None) -> list[Case]:
    """What is a second machine worth in shorter and in longer runs?"""
    found = []
    for seconds in LENGTHS:
        alone = (*PLACE, *overrides_of("default_alone", "nano"))
        found += cases("lengths", "alone", 1, alone, (seconds,), FURTHER_SEEDS)
        for side in ("two_10", "two_100"):
            chosen = (*PLACE, *overrides_of(side, "nano"))
            found += cases("lengths", side, 2, chosen, (HALF * seconds, LONGER * seconds), FURTHER_SEEDS)
    return found


def sizes(_: Path | None) -> list[Case]:
    """What is a second machine worth to a larger model, by as many tokens a parameter? On the clock of `tiny`, as if
    machines were as much faster, and on links in proportion."""
    smallest = min(parameters for _, _, parameters, _ in SIZES)
    found = []
    for width, depth, parameters, seconds in SIZES:
        chosen = (*shape_of(width, depth), *COMPARED, *on_clock("muon"))
        found += cases("sizes", f"alone_{width}x{depth}", 1, chosen, (seconds,), FURTHER_SEEDS)
        for mbit in ("10", "100"):
            side = (*chosen, *link(mbit, parameters / smallest))
            found += cases("sizes", f"two_{mbit}_{width}x{depth}", 2, side, (HALF * seconds,), FURTHER_SEEDS)
    return found


def rounds(_: Path | None) -> list[Case]:
    """What do rounds cost, by their length and by that of the run, where averages take no time?"""
    found = []
    for updates, wire, length in product(LENGTHS_IN_UPDATES, FORMATS, ROUNDS):
        tokens = updates * TOKENS_IN_UPDATE
        chosen = (*PLACE, *APART, f"wire={wire}", f"algorithm.updates_per_round={length}")
        found += cases("rounds", f"{wire}_H{length}", 2, chosen, (tokens,), FURTHER_SEEDS, "tokens")
    return found


def delays(_: Path | None) -> list[Case]:
    """What does it cost that an average arrives late, apart from the length of its round?"""
    found, tokens = [], DELAYED_UPDATES * TOKENS_IN_UPDATE
    for wire, by_length in DELAYS.items():
        for length, tried in by_length.items():
            for delay in tried:
                rhythm = (f"algorithm.updates_per_round={length}", f"wire.delay_updates={delay}")
                side = f"{wire}_H{length}_tau{delay}"
                chosen = (*PLACE, *APART, f"wire={wire}", *rhythm)
                found += cases("delays", side, 2, chosen, (tokens,), FURTHER_SEEDS, "tokens")
    return found
