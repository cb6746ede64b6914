"""Runs of the launcher as plain values: what every experiment is made of."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
"""Experiments start ranks and hosts with the helpers of the tests."""
LINKS = {"10": 1.25e6, "30": 3.75e6, "100": 12.5e6}
"""Bytes a second of links, by their Mbit/s."""
FREE: tuple[str, ...] = ()
"""Communication that takes no time."""
SEEDS = (0, 1, 2)
MEASURED = (
    "tracking=none", "run.report=false",
    "cluster.threads_per_rank=1", "checkpoint.every=null", "data.sequence_length=128",
    "evaluation.every=null", "evaluation.sequences=256", "evaluation.final_sequences=1024",
)  # fmt: skip
"""How every run is measured: on 1,024 validation sequences, at its end."""
COMPARED = ("data.validation_fraction=0.1", "evaluation.every=10%", "evaluation.sequences=1024")
"""After MEASURED: 1,024 validation sequences that no setting was chosen by, ten times in a run."""
SEQUENCE_SECONDS = 0.0091
UPDATE_SECONDS = {"adamw": 0.008, "muon": 0.0207}
"""A simulated clock: an update of `tiny` as it was measured on one core, by sequences of 128 tokens; with Muon it takes
longer by 1.4 sequences, measured beside the other on one core.

A message has the default latency of 0.5 ms, where an experiment names no other.
"""


def clock_of(optimizer: str) -> tuple[float, float]:
    """Seconds of an update whatever its batch, and of a sequence."""
    return UPDATE_SECONDS[optimizer], SEQUENCE_SECONDS


def on_clock(optimizer: str) -> tuple[str, ...]:
    """The simulated clock of an optimizer, which is named."""
    update, sequence = clock_of(optimizer)
    return (f"inner={optimizer}", f"simulation.update_seconds={update}", f"simulation.sequence_seconds={sequence}")


TINY = ("model=tiny", *on_clock("adamw"), "inner.lr=1.5e-3")
NANO = ("model=nano", *on_clock("adamw"), "inner.lr=3e-3")
"""A seventh of `tiny`, trained in a fifth of the time, on the same clock. Two hosts in short rounds come to rates of
2e-3 and 4e-3, which one alone has (`inner.lr_scaling`)."""
NANO_SHARE = 117_120 / 824_576
"""Parameters of `nano` in those of `tiny`: links are slower by as much, so that an average takes as long."""


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    """Question, side, seconds and seed; also the folder of the run."""
    ranks: int
    overrides: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """What launch/train.py is called with."""
        return ["--nproc-per-node", str(self.ranks), *MEASURED, *self.overrides]


def cases(
    question: str, side: str, ranks: int, overrides: Sequence[str], budgets: Iterable[float], seeds: Iterable[int],
    unit: str = "seconds",
) -> Iterator[Case]:  # fmt: skip
    """One side of a question, with several budgets and seeds.

    Args:
        unit: of the budgets; seconds or tokens.
    """
    for budget in budgets:
        for seed in seeds:
            counted = (f"budget={budget:.10g}{unit}", f"seed={seed}")
            yield Case(f"{question}/{side}/{budget:.10g}{unit[0]}/seed{seed}", ranks, (*overrides, *counted))


def link(name: str, share: float = 1.0) -> tuple[str, ...]:
    """A simulated link, by its Mbit/s."""
    return (f"simulation.bytes_per_second={LINKS[name] * share:.6g}",)


def corpora(wikitext: Path | None) -> dict[str, tuple[str, ...]]:
    """Other than the standard library: torch's C++ headers, and text where it is named."""
    headers = Path(torch.__file__).parent / "include"
    found = {"headers": ("data=text", f"data.train=['{headers}/**/*.h']")}
    return found if wikitext is None else {**found, "wikitext2": ("data=text", f"data.train=['{wikitext}']")}


def idle_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
