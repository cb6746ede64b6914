"""What the passes of an update cost, by their number and by their sequences: a fit over those that were seen."""

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

REMEMBERED = 10
"""Timed updates that a fit stands on, one of each measurement."""
MIN_SPREAD = 0.035
"""What tells two costs apart, at least: micro-batches of which one has half as many sequences again as another."""


class Passes(Struct, frozen=True):
    """The forward and backward passes of an update of all of a rank's workers of a trainer."""

    micro_batches: int
    """Of one worker."""
    sequences: int
    """Of one worker; its local batch."""
    seconds: float
    """Wall time, of all of them."""


class PassCost(Struct, frozen=True):
    """An update's passes take micro_batches * micro_batch_seconds + sequences * sequence_seconds."""

    micro_batch_seconds: float
    """What a micro-batch takes whatever its size: a GPU's launches, and reading the weights."""
    sequence_seconds: float

    def seconds(self, micro_batches: int, sequences: int) -> float:
        return micro_batches * self.micro_batch_seconds + sequences * self.sequence_seconds


def fit(seen: Sequence[Passes]) -> PassCost | None:
    """The cost that fits best, in relative terms, and is nowhere negative; None: nothing was seen.

    Of equal updates the median counts: a single one may have been interrupted. Where all have about as many sequences
    in a micro-batch, the two costs cannot be told apart, and sequences are taken to cost all.
    """
    by_size: dict[tuple[int, int], list[float]] = {}
    for one in seen:
        by_size.setdefault((one.micro_batches, one.sequences), []).append(one.seconds)
    if not by_size:
        return None
    seconds = {size: median(times) for size, times in by_size.items()}
    if not all(seconds.values()):  # on a simulated clock on which sequences take no time
        return PassCost(0.0, 0.0)
    # Least squares of 1 = micro_batches / seconds * x + sequences / seconds * y.
    rows = [(p / taken, b / taken) for (p, b), taken in seconds.items()]
    pp, pb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    p, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = pp * bb - pb**2
    if determinant > MIN_SPREAD * pp * bb:
        per_micro_batch, per_sequence = (bb * p - pb * b) / determinant, (pp * b - pb * p) / determinant
        if per_micro_batch >= 0 and per_sequence >= 0:
            return PassCost(per_micro_batch, per_sequence)
        if per_sequence < 0:
            return PassCost(p / pp, 0.0)
    return PassCost(0.0, b / bb)


def remembered(earlier: Sequence[Passes], latest: Sequence[Passes]) -> tuple[Passes, ...]:
    """The passes that the next fit stands on."""
    return tuple([*earlier, *latest][-REMEMBERED:])
