"""When the fragments of a model are averaged: the same on all ranks, from counted updates alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Streaming:
    """How averages are spread over a round, and hidden behind updates (Streaming DiLoCo, 2501.18512).

    As it stands, the whole model is averaged at the end of a round, and workers wait for it: plain DiLoCo.
    """

    fragments: int = 1
    """P: parts of the model that are averaged at different times of a round."""
    delay_updates: int = 0
    """tau: updates that are taken while an average travels, before its outer step reaches the worker."""

    @property
    def is_plain(self) -> bool:
        """Whether all workers have the same weights when a round ends."""
        return self.fragments == 1 and self.delay_updates == 0


@dataclass(frozen=True)
class FragmentSchedule:
    """The times of fragments in a round of `updates_per_round` updates, evenly spread; the first one's is its end.

    An average that starts after an update reaches the workers `delay_updates` later: that of the first fragment in the
    next round. Never are two under way.
    """

    updates_per_round: int
    fragments: int = 1
    delay_updates: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.updates_per_round:
            rule = f"must be from 1 to the {self.updates_per_round} updates of a round"
            raise ValueError(f"fragments={self.fragments}: {rule}")
        distance = self.updates_per_round // self.fragments
        if not 0 <= self.delay_updates < distance:
            rule = f"must be from 0 to below the {distance} updates between two averages"
            raise ValueError(f"delay_updates={self.delay_updates}: {rule}")

    def started(self, update: int) -> tuple[int, ...]:
        """The fragments whose averages start after so many updates of a round; the end's is not among them."""
        return tuple(p for p in range(1, self.fragments) if self._time(p) == update)

    def mixed(self, update: int) -> tuple[int, ...]:
        """The fragments that reach the workers after so many updates of a round; none where there is no delay."""
        delay = self.delay_updates
        times = {fragment: self._time(fragment) for fragment in range(1, self.fragments)} | {0: 0}
        return tuple(fragment for fragment, time in times.items() if delay and time + delay == update)

    def boundaries(self, updates: int) -> list[int]:
        """The numbers of updates after which there is something to do in a round of so many, ascending."""
        times = [self._time(fragment) for fragment in range(self.fragments)]
        found = {updates, *times, *(time + self.delay_updates for time in times)}
        return sorted(update for update in found if 1 <= update <= updates)

    def _time(self, fragment: int) -> int:
        return fragment * self.updates_per_round // self.fragments
