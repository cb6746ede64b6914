"""A worker, and what training changes beside its parameters, as an outer step sees them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from adloco_dist.averaging.fragments import Fragment, Run
from adloco_dist.averaging.group import Group
from adloco_dist.schema import AWAITS, NOTHING, Entry, Kind


def replica_entries(is_delayed: bool) -> list[Entry]:
    """What is kept of a `Replica` for the outer step; with a fragment if updates are taken while that travels."""
    return [
        *([Entry("departed", Kind.fragment, is_progress=True)] if is_delayed else []),
        Entry(AWAITS, Kind.equal, is_progress=True),
    ]


class Replica(ABC):
    """A worker of this rank. Anchors are flat vectors, (num_elements,), and of a run the elements that it has.

    Attributes:
        id: names it in reports.
        weight: what it counts for in averages.
        departed: its weights in the fragment that it awaits as they were sent off; zeros where it awaits none, empty
            without delay.
        awaits: the fragment whose outer step it has not received yet; NOTHING: none.
        entries: what is kept of it.
    """

    def __init__(self, replica_id: int, departed: torch.Tensor) -> None:
        """`departed` are zeros, room for the largest fragment, if updates are taken while it travels; else empty."""
        self.id, self.departed = replica_id, departed
        self.weight, self.awaits = 1.0, NOTHING
        self._given_up: tuple[int, torch.Tensor] | None = None
        self.entries = replica_entries(len(departed) > 0)

    def give_up(self) -> None:
        """Await nothing any more."""
        self._given_up = self.awaits, self.departed.clone()
        self.awaits = NOTHING
        self.departed.zero_()

    def has_given_up(self, fragment: int) -> bool:
        """Whether the average that began last was one of a fragment that it awaited, and gave up."""
        return self._given_up is not None and self._given_up[0] == fragment

    def begin(self) -> None:
        """An average begins: what was given up before is of no use any more."""
        self._given_up = None

    def await_again(self) -> None:
        """Await what was given up last, which other ranks have completed."""
        assert self._given_up is not None
        self.awaits, self.departed[:] = self._given_up

    def losses(self) -> list[torch.Tensor]:
        """Scalars that are not finite where its losses are not; none where they are not known."""
        return []

    @abstractmethod
    def runs(self, fragment: Fragment) -> Iterator[Run]:
        """Cut a fragment into runs, as all replicas of an outer step do."""

    @abstractmethod
    def add_difference(self, anchor: torch.Tensor, total: torch.Tensor, run: Run, is_first: bool) -> None:
        """Add the weighted x - w of a run to `total`, or let it begin with that; both on the device that computes."""

    @abstractmethod
    def restart(self, anchor: torch.Tensor, run: Run) -> None:
        """Take the anchor for weights, in a run."""

    @abstractmethod
    def recover(self, anchor: torch.Tensor) -> None:
        """Take the whole anchor for weights and buffers that are not finite, with a fresh optimizer state."""

    @abstractmethod
    def depart(self, fragment: Fragment) -> None:
        """Note the weights of a fragment, which is sent off while updates are taken."""

    @abstractmethod
    def rejoin(self, anchor: torch.Tensor, fragment: Fragment) -> None:
        """Receive the outer step of a fragment that was sent off, from the whole anchor x, and keep what was learned
        since: x + (w - departed)."""


R = TypeVar("R", bound=Replica)
R_contra = TypeVar("R_contra", bound=Replica, contravariant=True)


class Buffers(Protocol[R_contra]):
    """What training changes beside parameters (docs/state.md): the anchor's are the mean of the workers'.

    They travel as a vector of `num_elements`, with the payload where that is of the same type.
    """

    dtype: torch.dtype

    @property
    def num_elements(self) -> int: ...

    def find_changing(self, group: Group | None) -> None:
        """Find which buffers training changes, for the step that begins. Collective until one was taken."""
        ...

    def sum_of(self, replicas: Sequence[R_contra], total: torch.Tensor) -> None:
        """Fill such a vector with the weighted sum of the replicas' values."""
        ...

    def step(self, total: torch.Tensor, num_workers: float) -> None:
        """Make the mean of the workers' values, of their sum, the anchor's; of 0 workers they stay."""
        ...

    def restart(self, replicas: Sequence[R_contra]) -> None:
        """Give replicas the anchor's values."""
        ...
