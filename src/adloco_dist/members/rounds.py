"""Outer steps with whichever ranks there are: what of `DiLoCo` concerns the others."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from operator import add

import torch.distributed as dist

from adloco_dist.averaging.checks import GO_ON, PeerLostError
from adloco_dist.averaging.in_place import InPlace
from adloco_dist.averaging.meeting import meet
from adloco_dist.averaging.outer_step import OuterStep
from adloco_dist.averaging.own_group import Connection
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.members.members import Members

log = logging.getLogger("adloco_dist.diloco")


class Rounds:
    """The outer steps of this rank's worker, and where it stands; attributes as of `DiLoCo`."""

    def __init__(
        self, outer: OuterStep[InPlace], connection: Connection | Members, settings: Mapping[str, str]
    ) -> None:
        """Stand where the others do. Collective; `settings` are those that ranks compare."""
        self._outer, self._connection, self._settings = outer, connection, settings
        (self._replica,) = outer.workers
        self.round = self.updates = 0
        self.last_step: OuterStepReport | None = None
        self.holds_anchor = True
        self._started, self._has_failed = OuterStepReport(), False
        with self._until_all_stay():
            self._meet()

    def regroup(self, group: dist.ProcessGroup | None = None) -> None:
        """Average with the ranks of another group from now on: those that are left after a PeerLostError, or newcomers,
        for which constructing their `DiLoCo` is this call. Collective over them; groups before may be gone.

        An average that was under way is given up; where one of the ranks has completed it, the others take its step.
        Then all average what their workers have learned since, and begin a round. Newcomers, and ranks with another
        anchor, restart from that of the rank that has come furthest, with its outer momentum and buffers.

        Raises:
            ValueError, PeerLostError: as in construction. After the latter the rest may regroup again.
        """
        if isinstance(self._connection, Members):
            raise ValueError("group: members regroup by themselves")
        self._stand_alone()
        self._connection.leave(None, None)
        self._connection = self._connection.among(group, self._replica.parameters.device)
        self._has_failed = True  # until it has not
        self._meet()
        self._has_failed = False

    def _end_round(self) -> None:
        """Begin the next round; with the members that there are then, if some have come."""
        self.round, self.updates = self.round + 1, 0
        members = self._connection
        if isinstance(members, Members) and members.is_over():
            generation = members.generation
            self._settle()
            if members.generation is generation:  # else some were lost meanwhile, and it is over already
                self._go_on(members)

    def _go_on(self, members: Members) -> None:
        """Average with the members that there are now. Collective over them."""
        while True:
            self._stand_alone()
            try:
                members.regroup()
                self._meet()
            except PeerLostError as error:
                log.warning("members: %s", error)
                continue
            return

    def _stand_alone(self) -> None:
        """Give up what is under way, and have no worker await anything."""
        self._outer.abandon()
        self._outer.mix_awaited()

    def _meet(self) -> None:
        """Stand where those who have come furthest do, and average what anyone has learned since. Collective."""
        shared, has_learned = self._connection.shared, not self.holds_anchor
        self._outer.compares_anchors = shared is not None
        with self._connection.contact(self._outer.steps + 1):
            self.round, brings, any_brings = meet(
                shared, self._settings, self._outer, self.round, has_learned, self._connection.has_returned
            )
            self._replica.weight = float(brings) if any_brings else 1.0
            if any_brings:
                self._connection.connect()
                self.last_step = self._step(range(len(self._outer.fragments)))
                self._replica.weight, self.round = 1.0, self.round + 1
        self.updates, self.holds_anchor = 0, True

    def _step(self, fragments: Iterable[int]) -> OuterStepReport:
        return reduce(
            add, [timed(partial(self._outer.step, fragment, self._connection.group)) for fragment in fragments]
        )

    def _settle(self) -> None:
        if self._outer.under_way:
            with self._attempt():
                self._complete()

    def _complete(self) -> None:
        if self._outer.under_way:
            self.last_step = self._started + timed(self._outer.complete)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Refuse to go on after a failure in such a block, of which ranks may have done different parts; members that
        are left go on, and the block is over."""
        if self._has_failed:
            raise RuntimeError(f"an outer step has failed before; {GO_ON}")
        self._has_failed = True  # until it has not
        self._replica.parameters.check()
        with self._until_all_stay(), self._connection.contact(self._outer.steps + 1):
            self._connection.connect()
            yield
        self._has_failed = False

    @contextmanager
    def _until_all_stay(self) -> Iterator[None]:
        """Go on without members that are lost in the block."""
        try:
            yield
        except PeerLostError as error:
            if not isinstance(self._connection, Members):
                raise
            log.warning("members: %s", error)
            self._go_on(self._connection)


def timed(part: Callable[[], OuterStepReport]) -> OuterStepReport:
    """Take a part of an outer step; its report with the time that this took."""
    begin = time.perf_counter()
    report = part()
    return replace(report, seconds=time.perf_counter() - begin)
