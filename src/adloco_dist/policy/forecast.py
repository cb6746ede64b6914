"""What share of a round is left for updates on a measured link, before anything is trained."""

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
