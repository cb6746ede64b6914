"""What experiments/machines.py has found: ratios of times to a loss, seed by seed, with intervals."""

import math
import statistics
from collections.abc import Sequence

from kept import Points, Records, seconds_to
from machines import SEEDS, TARGETS


def share(ours: Points, theirs: Points) -> float:
    """Our time to the loss that another run's curve has at its end, over that run's time."""
    seconds, loss = theirs[-1]
    return seconds_to(loss, ours) / seconds


def is_extrapolated(ours: Points, theirs: Points) -> bool:
    """Whether none of our losses lies on one side of theirs: the time is read off a line that goes on."""
    loss, losses = theirs[-1][1], [one for _, one in ours]
    return not min(losses) <= loss <= max(losses)


def pairs(records: Records) -> dict[str, list[tuple[Points, Points]]]:
    """By figure, what one side's runs have come to and the other side's curve, of each seed of which there are both."""
    found: dict[str, list[tuple[Points, Points]]] = {}
    for figure, (side, other) in TARGETS.items():
        for seed in SEEDS:
            ours, theirs = records.reached("machines", side, seed), records.curve("machines", other, seed)
            if ours and theirs:
                found.setdefault(figure, []).append((ours, theirs))
    return found


def ratios(records: Records) -> dict[str, list[float]]:
    """By figure, the ratio of each seed of which there are both runs."""
    return {figure: [share(*curves) for curves in made] for figure, made in pairs(records).items()}


def extrapolated(records: Records) -> dict[str, int]:
    """By figure, the seeds whose ratio is extrapolated."""
    return {figure: sum(is_extrapolated(*curves) for curves in made) for figure, made in pairs(records).items()}


STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t of a two-sided interval of 95 %, by the number of values."""


def interval(values: Sequence[float]) -> str:
    """The mean with its interval of 95 %."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return ", ".join(f"{value:.3f}" for value in values)
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.3f} ± {half:.3f}"
