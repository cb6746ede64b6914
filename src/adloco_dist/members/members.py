"""Who averages together: processes that are started each by itself, and know where to look for each other."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch

from adloco_dist.averaging.checks import PeerLostError, is_of_another
from adloco_dist.averaging.group import Group, worker_in_words
from adloco_dist.members.calls import split
from adloco_dist.members.direct import BreakableGroup, connected
from adloco_dist.members.roll import Generation
from adloco_dist.members.seat import Seat
from adloco_dist.text import first_line

log = logging.getLogger("adloco_dist.diloco")

BEAT_SECONDS = 1.0
"""Between two signs of life, at most."""


class Members:
    """Those who average with each other: whoever is there. `DiLoCo` takes it instead of a group; every member is a
    process of its own, which nobody has to start together with the others::

        with DiLoCo(model, optimizer, members=Members("10.0.0.1:29400,10.0.0.2:29400")) as diloco:

    A member that is lost costs the others what they wait for it: nothing if its process has ended, `silence_seconds`
    if its machine is gone. They average what they have learned, and go on. A newcomer, or a member that comes back,
    takes part from the end of a round on, with the anchor of the others.

    Attributes:
        group: those who average now; None: this member is alone.
    """

    def __init__(self, meet: str, listen: str | None = None, silence_seconds: float = 10.0, least: int = 1) -> None:
        """
        Args:
            meet: HOST:PORT of members, separated by commas, the same for all of them. Who starts looks for others
                there; a member whose machine has one of these addresses listens there. Where nobody is, the first of
                them begins.
            listen: HOST:PORT at which the others reach this member instead; None: one of `meet`, or any free port.
            silence_seconds: a member that was not heard of for so long is lost.
            least: as many members have to be there; fewer wait. With more than half of all, one part at most of a
                network that is split goes on. Else each does, and when it is whole again the smaller joins the larger.

        Raises:
            ValueError: an argument cannot be used; one line.
        """
        self._meet = [address.strip() for address in meet.split(",")]
        for name, address in [("meet", one) for one in self._meet] + ([("listen", listen)] if listen else []):
            try:
                split(address)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if not silence_seconds > 0:
            raise ValueError(f"silence_seconds={silence_seconds}: must be > 0")
        if not isinstance(least, int) or least < 1:
            raise ValueError(f"least={least}: must be a whole number >= 1")
        self._listen, self._silence, self._least = listen, silence_seconds, least
        self.group: BreakableGroup | None = None
        self._seat: Seat | None = None
        self._rounds = self._seen = self._looks = 0
        """Rounds of this generation that have ended here, and had when the roll was last asked; looks for others."""

    def join(self, facts: Mapping[str, str], device: torch.device, timeout_seconds: float, notice_rounds: int) -> None:
        """Find the others, or begin; `group` is set then. Collective over those who are in it.

        Args:
            facts: what members have to have in common.
            device: where tensors are.
            timeout_seconds: of one collective.
            notice_rounds: so many rounds after the first member has noticed newcomers they come in. Members may be one
                round apart, or two, where averages travel while updates are taken; one more makes sure that all know.

        Raises:
            ValueError: this member has other facts than those who are there, or cannot listen; one line.
        """
        if self._seat:
            raise ValueError(f"members: {self.address} is a member of another DiLoCo; construct Members for each")
        self._device, self._timeout_seconds, self._notice = device, timeout_seconds, notice_rounds
        seat = self._seat = Seat(self._meet, self._listen, facts, self._silence, self._least, timeout_seconds)
        try:
            generation = seat.find_place()
            self._watch = threading.Thread(target=self._watch_on, args=(seat,), name="members", daemon=True)
            self._watch.start()
            while not self._has_begun(generation):
                generation = seat.next()
        except BaseException:
            seat.close()
            raise

    def _has_begun(self, generation: Generation) -> bool:
        """Connect the members of a generation; whether none of them is gone meanwhile."""
        try:
            self._begin(generation)
        except PeerLostError as error:
            log.warning("members: %s", error)
            return False
        return True

    @property
    def address(self) -> str:
        """Where the others reach this member, HOST:PORT; empty before `DiLoCo` is constructed."""
        return self._seat.address if self._seat else ""

    @property
    def has_returned(self) -> bool:
        """Whether this member has learned apart from those who average now, who are followed."""
        return self._joined.has_returned

    @property
    def generation(self) -> Generation | None:
        """Who averages now."""
        return self._joined.roll.generation

    @property
    def shared(self) -> Group | None:
        """The group in which members meet: the same."""
        return self.group

    @property
    def worker(self) -> str:
        """This member, in words."""
        return worker_in_words(self.group)

    def connect(self) -> None:
        """Nothing is to be done, as a generation is connected; unless this member has left."""
        if self._joined.roll.has_left:
            raise RuntimeError(f"members: {self.address} has left them; construct DiLoCo and Members anew to come back")

    def is_over(self) -> bool:
        """Whether the generation is over, now that a round has ended: because newcomers wait, alike on all members; or
        because this one, which was alone, is to join others."""
        seat, roll = self._joined, self._joined.roll
        with seat.lock:
            self._rounds += 1
            if roll.asking and roll.ends_after is None and seat.keeps_roll:
                roll.ends_after = self._rounds + self._notice
            seat.lock.notify_all()
            # A look that began since the round before shows what was decided `notice_rounds` ago.
            seat.lock.wait_for(lambda: not self._is_awaited(seat))
            return roll.ends_after == self._rounds or (roll.is_over and self.group is None)

    def regroup(self) -> None:
        """Begin the next generation, with all who are left and the newcomers. Collective over them.

        Raises:
            PeerLostError: another one is gone meanwhile.
        """
        self._close()
        before = self._joined.roll.generation
        after = self._joined.next()
        assert before
        gone, come = set(before.members) - set(after.members), set(after.members) - set(before.members)
        changes = [f"{', '.join(sorted(some))} {what}" for some, what in ((gone, "gone"), (come, "new")) if some]
        log.warning("members: %s; %d average now", "; ".join(changes) or "as before", len(after.members))
        self._begin(after)

    def leave(self, where: str | None, error: BaseException | None) -> None:
        """Take part in nothing any more; the others find out at once."""
        self._joined.close()
        if error is not None and self.group is not None:
            self.group.break_off()  # what travels would keep its connections open
        self._close()
        self._watch.join(self._silence)

    @contextmanager
    def contact(self, step: int) -> Iterator[None]:
        """Raise a PeerLostError, and leave the group, if collectives in the block fail because of another member.
        `step` numbers the outer step, for the error's line."""
        try:
            yield
        except RuntimeError as error:
            if not is_of_another(error):
                raise
            self._close()
            raise PeerLostError(f"outer step {step} of {self.address}: {first_line(error)}") from error

    @property
    def _joined(self) -> Seat:
        assert self._seat, "DiLoCo joins"
        return self._seat

    def _begin(self, generation: Generation) -> None:
        """Connect the members of a generation."""
        seat, size = self._joined, len(generation.members)
        with seat.lock:  # or a look that is under way would count what the generation before had
            seat.begin(generation)
            self._rounds = self._seen = 0
        if size == 1:
            return
        patience = timedelta(seconds=2 * self._silence)
        with self.contact(0):
            self.group = connected(seat, generation, self._device, self._timeout_seconds, patience)

    def _close(self) -> None:
        with self._joined.lock:
            group, self.group = self.group, None
        if group is not None:
            group.close()

    def _watch_on(self, seat: Seat) -> None:
        """Tell who keeps the roll that this member lives, and look whether the generation is over; in a thread."""
        every, roll = min(BEAT_SECONDS, self._silence / 5), seat.roll
        looked_at = time.monotonic()
        while not roll.has_left:
            with seat.lock:
                seat.lock.wait_for(lambda: self._is_awaited(seat) or roll.has_left, timeout=every)
                generation, rounds, now = roll.generation, self._rounds, time.monotonic()
                if now - looked_at > 2 * every + self._silence / 2:  # this process stood still, and heard nobody
                    roll.heard = dict.fromkeys(roll.heard, now)
                looked_at = now
            if generation is None or roll.has_left:
                continue
            is_over = roll.is_over or (
                self._is_split(seat, generation) if seat.keeps_roll else self._is_late(seat, generation, rounds)
            )
            if is_over:
                self._give_up(seat, generation)  # again and again: the other thread may just have begun to wait

    def _is_awaited(self, seat: Seat) -> bool:
        """Whether the round that has ended waits for what the roll says."""
        return not (seat.keeps_roll or seat.roll.is_over) and self._seen < self._rounds - 1

    def _is_split(self, seat: Seat, generation: Generation) -> bool:
        """Whether a member is silent, or there is a larger generation, for which one other process is asked in turn;
        for who keeps the roll."""
        with seat.lock:
            if set(seat.roll.silent(self._silence)) - {seat.address}:
                return True
        self._looks += 1
        if not (others := seat.others):
            return False
        seconds = min(BEAT_SECONDS, self._silence / 5)
        if other := seat.larger(others[self._looks % len(others)], generation, seconds):
            with seat.lock:
                seat.yields_to, seat.roll.moved_to = other, other.members[0]
        return other is not None

    def _is_late(self, seat: Seat, generation: Generation, rounds: int) -> bool:
        """Whether a generation is over, as who keeps its roll says, or as it is gone; and what else it says."""
        reply = seat.ask(generation.members[0], "beat", generation)
        if reply is None or reply["is_over"] or reply["has_left"]:
            return True
        newest = Generation.of(reply["generation"])
        if newest is None or newest.name != generation.name:
            return True
        with seat.lock:
            if seat.roll.generation is generation:
                seat.roll.ends_after, self._seen = reply["ends_after"], rounds
                seat.lock.notify_all()
        return False

    def _give_up(self, seat: Seat, generation: Generation) -> None:
        """End what a generation waits for: its connections close, and the thread that uses them has an error."""
        with seat.lock:
            if seat.roll.generation is not generation:
                return
            seat.roll.is_over, group = True, self.group
            seat.lock.notify_all()
        if group is not None:
            group.break_off()
