"""What to expect of a run before it trains: the share of a round that is left for updates, and how many averages."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundForecast:
    """One rank's round: updates, and averages that travel while some of them are computed."""

    updates: int
    """Updates of all the rank's workers, one after the other."""
    delay_updates: int
    """Those of them that are computed while one average travels."""
    transfer_seconds: float
    """Time that the bytes of the round's averages need on the rank's slowest link."""
    fragments: int = 1
    """Averages among which they are divided."""

    def utilisation(self, update_seconds: float) -> float:
        """Share of the round that is spent in updates of that length; latencies and outer steps are not counted."""
        computing = self.updates * update_seconds
        return computing / (computing + self.exposed_seconds(update_seconds))

    def exposed_seconds(self, update_seconds: float) -> float:
        """Time of a round that workers wait for averages, with updates of that length."""
        each = self.transfer_seconds / self.fragments
        return self.fragments * max(0.0, each - self.delay_updates * update_seconds)

    def update_seconds(self, utilisation: float) -> float:
        """How long an update must take for that share, in (0, 1): shorter ones wait for averages."""
        hidden = self.fragments * self.delay_updates
        return self.transfer_seconds / (self.updates * (1 / utilisation - 1) + hidden)


def shortest_round(
    utilisation: float, update_seconds: float, transfer_seconds: float, fragments: int, delay_updates: int | None
) -> int:
    """The smallest H with which updates have that share of a round, in (0, 1); the inverse of `RoundForecast`, with
    seconds of one update of all the rank's workers. A delay of None is the longest: one less than H over the fragments.
    """
    transfer = transfer_seconds / update_seconds
    if delay_updates is None:  # of m updates for each fragment, m - 1 hide it
        return fragments * max(2, math.ceil(utilisation * (transfer / fragments + 1)))
    exposed = max(0.0, transfer - fragments * delay_updates)
    return max(fragments * (delay_updates + 1), math.ceil(exposed * utilisation / (1 - utilisation)))


FLOPS_PER_PARAMETER = 6
"""Of each token of an update: a multiplication and an addition forward, and twice as many back; attention's own
products are not counted."""


def computing_seconds(num_parameters: int, tokens: int, flops_per_second: float) -> float:
    """Time in which a device computes an update of so many tokens, whatever else it waits for."""
    return FLOPS_PER_PARAMETER * num_parameters * tokens / flops_per_second


GROWS_FROM = 0.1
"""Share of the sequences that is seen before a batch outgrows the first one; assumed (docs/theory.md)."""


def rounds_until(sequences: float, updates: int, first_batch: int, exponent: float) -> float:
    """Rounds of H `updates`, each with one average, until a trainer has taken so many sequences (docs/theory.md).

    Args:
        first_batch: total batch until `GROWS_FROM` of the sequences are seen.
        exponent: >= 0; from there on the batch grows as the sequences seen to this power. 0: not at all; 1: the
            squared gradient falls as one over the sequences, and the noise stays.
    """
    start, left = GROWS_FROM, 1 - exponent
    grown = math.log(1 / start) if left == 0 else (1 - start**left) / left
    return sequences / (updates * first_batch) * (start + start**exponent * grown)
