"""What Muon and further machines are worth: runs on sequences that no setting was chosen by, with seeds that none was.

The settings of both sides come from one search (`tuning` in questions.py), on other validation sequences.
"""

from collections.abc import Iterable
from pathlib import Path

from cases import COMPARED, NANO_SHARE, Case, cases, link, on_clock

SEEDS = (10, 11, 12, 13, 14)
SECONDS = 150
"""Of one machine alone."""
ALONE = (
    "algorithm=localsgd", "algorithm.updates_per_round=8", "batching.request=none", "inner.schedule=wsd",
    "outer.average_span=0.1",
)  # fmt: skip
"""One worker that averages with nobody, at the default's course of the rate with an average of its weights."""
OF_ADAMW = (*on_clock("adamw"), "inner.weight_decay=0", "inner.beta1=0.8", "inner.warmup_fraction=0.2")
OF_MUON = (*on_clock("muon"), "inner.weight_decay=0", "inner.momentum=0.8")
CONSTANT = {"adamw": (*OF_ADAMW, "batching.local_batch=8"), "muon": (*OF_MUON, "batching.local_batch=16")}
"""One machine alone; each at the best of its settings in the search."""
RATES = {"adamw": 1.4e-3, "muon": 5e-3}
"""Of `tiny`: with AdamW, whose own is 1e-3, and of Muon with a constant batch. The default finds its own."""
VARIANTS = {
    "25ms": ("simulation.latency_seconds=0.025",),
    "75ms": ("simulation.latency_seconds=0.075",),
    "sparse": ("wire=sparse", "wire.fraction=0.0625", "wire.delay_updates=null"),
    "computing": ("simulation.average_seconds=0.0075",),
    "adamw": OF_ADAMW,
    "constant": ("batching.request=none", "batching.local_batch=8"),
}
"""What differs from the default, by how a side's name ends. sparse: what travelled on slow links before signs did.
computing: what averages compute takes its time, too, beside updates of 57 ms; on two real hosts 9.4 to 10.3 ms beside
71 to 77 (clock.py). constant: the best constant batch of the search on two hosts."""
OF_MODEL = {"tiny": 1.0, "nano": 2.0}
"""Rates over those of `tiny`: nearer to the best of `nano`."""
SIDES = {
    "alone_muon": (1, (SECONDS,)), "default_alone": (1, (85, SECONDS)), "two_10": (2, (50, 96, 105)),
    "two_100": (2, (94,)), "four_100": (4, (56, 64)), "eight_100": (8, (40, 46)), "alone_adamw": (1, (SECONDS,)),
    "two_10_adamw": (2, (90,)), "eight_10": (8, (60,)), "sixteen_100": (16, (32,)), "two_10_sparse": (2, (100,)),
    "two_10_25ms": (2, (100,)), "two_10_75ms": (2, (100,)), "two_10_computing": (2, (98,)),
    "two_10_constant": (2, (88,)), "two_100_constant": (2, (86,)), "two_30": (2, (95,)), "two_30_constant": (2, (87,)),
}  # fmt: skip
"""Ranks and seconds; a side has the Mbit/s of its link in its name, and what differs from the default. As the rate
decays at the end of a run, one that is to come to another side's loss should have little more than the time that takes:
so some have several lengths."""
TARGETS = {
    "second_machine_10mbit": ("two_10", "default_alone"),
    "second_machine_100mbit": ("two_100", "default_alone"),
    "second_machine_30mbit": ("two_30", "default_alone"),
    "four_machines_100mbit": ("four_100", "default_alone"),
    "eight_hosts_100mbit": ("eight_100", "default_alone"),
    "eight_hosts_10mbit": ("eight_10", "default_alone"),
    "sixteen_hosts_100mbit": ("sixteen_100", "default_alone"),
    "second_machine_10mbit_sparse": ("two_10_sparse", "default_alone"),
    "second_machine_10mbit_25ms": ("two_10_25ms", "default_alone"),
    "second_machine_10mbit_75ms": ("two_10_75ms", "default_alone"),
    "second_machine_10mbit_computing": ("two_10_computing", "default_alone"),
    "second_machine_10mbit_over_constant": ("two_10", "alone_muon"),
    "second_machine_100mbit_over_constant": ("two_100", "alone_muon"),
    "four_machines_100mbit_over_constant": ("four_100", "alone_muon"),
    "eight_hosts_100mbit_over_constant": ("eight_100", "alone_muon"),
    "over_best_constant_alone": ("default_alone", "alone_muon"),
    "over_best_constant_10mbit": ("two_10", "two_10_constant"),
    "over_best_constant_30mbit": ("two_30", "two_30_constant"),
    "over_best_constant_100mbit": ("two_100", "two_100_constant"),
    "default_over_adamw_alone": ("default_alone", "alone_adamw"),
    "default_over_adamw_10mbit": ("two_10", "two_10_adamw"),
    "muon_over_adamw_alone": ("alone_muon", "alone_adamw"),
}
"""By figure: the time of the first side to the loss that the second has at its end, over that side's time."""


def overrides_of(side: str, model: str = "tiny") -> tuple[str, ...]:
    """What a side runs; links of `nano` are slower by its share of the parameters."""
    if side.startswith("alone"):
        optimizer = side.removeprefix("alone_")
        return (*ALONE, *CONSTANT[optimizer], f"inner.lr={RATES[optimizer] * OF_MODEL[model]:g}")
    (_, mbit, *_), variant = side.split("_"), side.rpartition("_")[2]
    over = link(mbit, NANO_SHARE if model == "nano" else 1.0) if mbit.isdigit() else ()
    named = (f"inner.lr={RATES['adamw'] * OF_MODEL[model]:g}",) if variant == "adamw" else ()
    return (*on_clock("muon"), *over, *VARIANTS.get(variant, ()), *named)


def runs_of(sides: Iterable[str], model: str, seeds: Iterable[int]) -> list[Case]:
    """The runs of these sides, seed by seed."""
    return [
        case
        for seed in seeds
        for side in sides
        for ranks, seconds in [SIDES[side]]
        for case in cases(
            "machines", side, ranks, (f"model={model}", *COMPARED, *overrides_of(side, model)), seconds, (seed,)
        )
    ]


def machines(_: Path | None) -> list[Case]:
    """What are Muon, a second, four and eight machines worth, beside one alone at its best in 150 s?"""
    return runs_of(SIDES, "tiny", SEEDS)
