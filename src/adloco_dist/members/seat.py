"""A process as the others reach it: it answers them, and finds the generation that it is in next."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from adloco_dist.members.calls import Message, Server, address_towards, call, split
from adloco_dist.members.roll import Generation, Roll
from adloco_dist.text import first_difference

log = logging.getLogger("adloco_dist.diloco")

LOOK_SECONDS = 0.05
"""Between two looks at what others do, by a member that waits for them."""
LAST_SECONDS = 1.0
"""What a member that has been silent for long has left to answer."""
LOOPBACK = "127.0.0.1"
SAY_SECONDS = 5.0
"""A wait is worth a line after this."""


class Seat:
    """A member's address, its roll, and the search for others.

    Attributes:
        address: where the others reach it, HOST:PORT.
        lock: of the roll; notified where a member waits for a change.
        lost: members that were there in earlier generations, and are not.
        yields_to: the larger part of a network that was split, which this member's is to join; None: there is none.
    """

    def __init__(
        self, meet: Sequence[str], listen: str | None, facts: Mapping[str, str], silence_seconds: float, least: int
    ) -> None:
        """Arguments as of `Members`; a ValueError of one line says that nobody can listen there."""
        self._meet, self._silence, self._least = meet, silence_seconds, least
        self.roll, self.lock = Roll(facts, time.monotonic), threading.Condition()
        self._server = self._serve(
            [listen] if listen else [*meet, f"{address_towards(split(meet[0])[0]) or LOOPBACK}:0"]
        )
        self.address = self._server.address
        self.lost: list[str] = []
        self.yields_to: Generation | None = None

    @property
    def keeps_roll(self) -> bool:
        """Whether this member is the first of its generation."""
        return self.roll.generation is not None and self.roll.generation.members[0] == self.address

    def begin(self, generation: Generation) -> None:
        """A generation begins."""
        with self.lock:
            before = self.roll.generation.members if self.roll.generation else ()
            self.lost = [address for address in {*self.lost, *before} if address not in generation.members]
            self.roll.begin(generation)
            self.yields_to = None

    def close(self) -> None:
        """Take part in nothing any more."""
        with self.lock:
            self.roll.has_left = True
            self.lock.notify_all()
        self._server.close()

    def ask(
        self,
        address: str,
        what: str,
        generation: Generation | None = None,
        seconds: float | None = None,
        **more: object,
    ) -> Message | None:
        """What another process answers; None: it does not, or not in time, which is `silence_seconds` if not given."""
        message = {"ask": what, "by": self.address, "generation": generation and generation.name, **more}
        try:
            return call(address, message, self._silence if seconds is None else seconds)
        except (OSError, ValueError):
            return None

    def find_place(self) -> Generation:
        """The next generation of others who are there, with this member in it; where nobody is, one of its own.

        Raises:
            ValueError: the others have other facts.
        """
        said_at = time.monotonic() + SAY_SECONDS
        while True:
            if found := self.newest([*self._meet, *self.lost]):
                if place := self._wait_for_place(found):
                    return place
            elif self.address == self._meet[0] or self.roll.generation:
                number = self.roll.generation.number + 1 if self.roll.generation else 1
                alone = Generation(number, (self.address,))
                if self._least == 1:
                    return alone
                self.begin(alone)
                return self._preside(alone)
            if time.monotonic() > said_at:
                said_at = float("inf")
                log.warning("members: %s waits for others at %s", self.address, ", ".join(self._meet))
            time.sleep(LOOK_SECONDS)

    def newest(self, addresses: Iterable[str]) -> Generation | None:
        """The generation of the first of these processes who is in one."""
        for address in addresses:
            reply = self.ask(address, "who") if address != self.address else None
            if reply and not reply["has_left"] and (found := Generation.of(reply["generation"])):
                return found
        return None

    def next(self) -> Generation:
        """The generation after this member's, which is over: of all who are left, and newcomers."""
        before = self.roll.generation
        assert before
        with self.lock:
            self.roll.is_over = True
            self.lock.notify_all()
        if self.yields_to:
            return self._wait_for_place(self.yields_to) or self.find_place()
        for first in before.members:
            if found := self._preside(before) if first == self.address else self._attend(first, before):
                return found
        return self.find_place()

    def _attend(self, first: str, before: Generation) -> Generation | None:
        """Come to who keeps the next roll, and wait for it; None: it is gone."""
        order = before.members.index
        self._come_to(first)
        while reply := self.ask(first, "here", before):
            newest = Generation.of(reply["generation"])
            if reply["has_left"] or newest is None:
                return None
            if self.address in newest.members and newest.number > before.number:
                return newest
            if reply["moved_to"] or newest.name != before.name:  # they have gone on without this member
                return self._wait_for_place(self.newest([reply["moved_to"] or first]) or newest) or self.find_place()
            earlier = reply["comes_to"]  # it seemed to be gone, here alone
            if earlier and earlier != self.address and order(earlier) < order(first):
                if found := self._attend(earlier, before):
                    return found
                self._come_to(first)
            time.sleep(LOOK_SECONDS)
        return None

    def _come_to(self, first: str) -> None:
        with self.lock:
            self.roll.comes_to = first

    def _preside(self, before: Generation) -> Generation:
        """Wait for all who are left, and make the next generation of them and of newcomers."""
        said_at, gone, order = time.monotonic() + SAY_SECONDS, set[str](), before.members.index
        self._come_to(self.address)
        while True:
            for address in {*before.members} - self.roll.here - gone - {self.address}:
                is_silent = address in self.roll.silent(self._silence)
                reply = self.ask(address, "who", seconds=min(LAST_SECONDS, self._silence) if is_silent else None)
                newest = Generation.of(reply["generation"]) if reply and not reply["has_left"] else None
                if newest is None or newest.name != before.name:
                    gone.add(address)
                elif order(address) < order(self.address):  # it seemed to be gone, here alone
                    if found := self._attend(address, before):
                        return found
                    self._come_to(self.address)
                if newest and newest.name != before.name and len(newest.members) > len(self.roll.here):
                    return self._wait_for_place(newest) or self.find_place()  # they have gone on without this one
            with self.lock:
                here, asking = list(self.roll.here), list(self.roll.asking)
            if gone.union(here, [self.address]).issuperset(before.members):
                newcomers = [address for address in asking if address not in here and self.ask(address, "who")]
                if 1 + len(here) + len(newcomers) >= self._least:
                    return self.roll.following(self.address, here, newcomers)
                if time.monotonic() > said_at:
                    said_at = float("inf")
                    log.warning("members: %d are there, of least=%d; waiting", 1 + len(here), self._least)
            time.sleep(LOOK_SECONDS)

    def _wait_for_place(self, found: Generation) -> Generation | None:
        """Ask for a place in the generation after `found`, and wait for it; None: all of its members are gone."""
        others = [address for address in found.members if address != self.address]
        while others:
            reply = self.ask(others[0], "place", found)
            newest = Generation.of(reply["generation"]) if reply and not reply["has_left"] else None
            if reply is None or newest is None:
                others.pop(0)
                continue
            if reply["facts"] != self.roll.facts:
                difference = first_difference([reply["facts"], dict(self.roll.facts)], (0, 1))
                raise ValueError(f"members: {difference} (0: those at {others[0]}, 1: this one)")
            if newest.name != found.name:
                if self.address in newest.members:
                    return newest
                return self._wait_for_place(newest)
            time.sleep(LOOK_SECONDS)
        return None

    def _serve(self, addresses: Sequence[str]) -> Server:
        """Listen at the first of these addresses where that can be."""
        reasons = []
        for address in addresses:
            try:
                return Server(*split(address), self._answer)
            except OSError as error:  # in use, or an address of another machine
                reasons.append(f"{address} ({error.strerror or error})")
        raise ValueError(f"listen: this process cannot listen at {', '.join(reasons)}")

    def _answer(self, message: Message) -> Message:
        with self.lock:
            return self.roll.answer(message)
