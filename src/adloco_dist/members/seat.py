"""A process as the others reach it: it answers them, and finds the generation that it is in next."""

import errno
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from adloco_dist.members.calls import Message, Server, address_towards, call, split
from adloco_dist.members.roll import Generation, Roll
from adloco_dist.text import first_difference

log = logging.getLogger("adloco_dist.diloco")

LOOK_SECONDS = 0.05
"""Between two looks at what others do, by a member that waits for them."""
LAST_SECONDS = 0.5
"""What a member that has been silent for long has left to answer."""
MISSES = 2
"""As often it does not answer in that time before it is lost: a single packet may be."""
MOST_LOST = 64
"""Members that are kept in mind after they were lost."""
LOOPBACK = "127.0.0.1"
SAY_SECONDS = 5.0
"""A wait is worth a line after this."""


class Seat:
    """A member's address, its roll, and the search for others.

    Attributes:
        address: where the others reach it, HOST:PORT.
        lock: of the roll; notified where a member waits for a change.
        yields_to: the larger part of a network that was split, which this member's is to join; None: there is none.
        has_returned: whether this member was in another generation than those whose next one it is in.
    """

    def __init__(
        self,
        meet: Sequence[str],
        listen: str | None,
        facts: Mapping[str, str],
        silence_seconds: float,
        least: int,
        patience_seconds: float = 1800.0,
    ) -> None:
        """Arguments as of `Members`; a ValueError of one line says that nobody can listen there.

        Args:
            patience_seconds: how long a member that lives is waited for.
        """
        self._meet, self._silence, self._least, self._patience = meet, silence_seconds, least, patience_seconds
        self._word = secrets.token_hex(4)
        """Of this process."""
        self.roll, self.lock = Roll(facts, time.monotonic), threading.Condition()
        self._taken = ""
        """What a line about a wait says of the addresses that other processes of this machine have."""
        self._server = self._serve(
            [listen] if listen else [*meet, f"{address_towards(split(meet[0])[0]) or LOOPBACK}:0"]
        )
        self.address = self._server.address
        self._lost: list[str] = []
        """Members that were there in earlier generations, and are not."""
        self._mute: dict[str, float] = {}
        """When others have last not answered in time."""
        self.yields_to: Generation | None = None
        self.has_returned = False

    @property
    def keeps_roll(self) -> bool:
        """Whether this member is the first of its generation."""
        return self.roll.generation is not None and self.roll.generation.members[0] == self.address

    def begin(self, generation: Generation) -> None:
        """A generation begins."""
        with self.lock:
            before = self.roll.generation.members if self.roll.generation else ()
            known = dict.fromkeys([*self._lost, *before])
            self._lost = [address for address in known if address not in generation.members][-MOST_LOST:]
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
        """What another process answers; None: it does not, or not in time, which is `silence_seconds` if not given, or
        little where it was not in time within the last `silence_seconds`."""
        message = {"ask": what, "by": self.address, "generation": generation and generation.name, **more}
        is_mute = time.monotonic() - self._mute.get(address, float("-inf")) < self._silence
        try:
            reply = call(address, message, seconds or (LAST_SECONDS if is_mute else self._silence))
        except TimeoutError:
            self._mute[address] = time.monotonic()
            return None
        except (OSError, ValueError):
            self._mute.pop(address, None)
            return None
        self._mute.pop(address, None)
        return reply

    def find_place(self) -> Generation:
        """The next generation of others who are there, with this member in it; where nobody is, one of its own.

        Raises:
            ValueError: the others have other facts.
        """
        said_at = time.monotonic() + SAY_SECONDS
        while True:
            own = self.roll.generation
            found = self.newest(self.others)
            if found and not (own and found.name == own.name):
                if place := self._wait_for_place(found):
                    return place
            elif self.address == self._meet[0] or own:
                alone = Generation(own.number + 1 if own else 1, (self.address,), self._word)
                if self._least == 1:
                    return alone
                self.begin(alone)
                return self._preside(alone)
            if time.monotonic() > said_at:
                said_at = float("inf")
                log.warning("members: %s waits for others at %s%s", self.address, ", ".join(self._meet), self._taken)
            time.sleep(LOOK_SECONDS)

    @property
    def others(self) -> list[str]:
        """Where members of another part of the network may be."""
        own = self.roll.generation.members if self.roll.generation else ()
        with self.lock:
            known = dict.fromkeys([*self._meet, *self._lost, *self.roll.met])
        return [address for address in known if address not in own and address != self.address]

    def newest(self, addresses: Iterable[str], seconds: float | None = None) -> Generation | None:
        """The generation of the first of these processes who is in one, and stays."""
        for address in addresses:
            reply = self.ask(address, "who", seconds=seconds)
            stays = reply and not (reply["has_left"] or reply["moved_to"])
            if reply and stays and (found := Generation.of(reply["generation"])):
                return found
        return None

    def larger(self, address: str, generation: Generation, seconds: float) -> Generation | None:
        """The generation of another process if the members of `generation` are to join that."""
        other = self.newest([address], seconds)
        return other if other and self.address not in other.members and other.precedes(generation) else None

    def next(self) -> Generation:
        """The generation after this member's, which is over: of all who are left, and newcomers."""
        before = self.roll.generation
        assert before
        self.has_returned = False
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
        begin, misses, gone, order = time.monotonic(), Counter[str](), set[str](), before.members.index
        said_at = begin + SAY_SECONDS
        self._come_to(self.address)
        while True:
            for address in {*before.members} - self.roll.here - gone - {self.address}:
                reply = self.ask(address, "who", seconds=min(LAST_SECONDS, self._silence))
                newest = Generation.of(reply["generation"]) if reply and not reply["has_left"] else None
                misses[address] += 1
                if reply is None and address in self._mute and misses[address] < MISSES:
                    continue
                if newest is None or newest.name != before.name or time.monotonic() - begin > self._patience:
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
                following = self.roll.following(self.address, here, newcomers, self._word)
                if len(following.members) >= self._least:
                    return following
                gone.clear()  # a network that was split may be whole again
                for address in self.others:
                    other = self.larger(address, following, LAST_SECONDS)
                    if other and (place := self._wait_for_place(other)):
                        return place
                if time.monotonic() > said_at:
                    said_at = float("inf")
                    log.warning("members: %d are there, of least=%d; waiting", len(following.members), self._least)
            time.sleep(LOOK_SECONDS)

    def _wait_for_place(self, found: Generation) -> Generation | None:
        """Ask for a place in the generation after `found`, and wait for it; None: all of its members are gone, or come
        here."""
        while True:
            for address in (one for one in found.members if one != self.address):
                reply = self.ask(address, "place", found, facts=self.roll.digest)
                newest = Generation.of(reply["generation"]) if reply and not reply["has_left"] else None
                if reply is None or newest is None:
                    continue
                if reply["facts"]:
                    difference = first_difference([reply["facts"], dict(self.roll.facts)], (0, 1))
                    raise ValueError(f"members: {difference} (0: those at {address}, 1: this one)")
                if reply["moved_to"] == self.address:
                    return None
                if newest.name != found.name and self.address in newest.members:
                    self.has_returned = self.roll.generation is not None
                    return newest
                found = newest
                break
            else:
                return None
            time.sleep(LOOK_SECONDS)

    def _serve(self, addresses: Sequence[str]) -> Server:
        """Listen at the first of these addresses where that can be."""
        reasons = []
        for address in addresses:
            try:
                return Server(*split(address), self._answer)
            except OSError as error:  # in use, or an address of another machine
                reasons.append(f"{address} ({error.strerror or error})")
                if error.errno == errno.EADDRINUSE:
                    self._taken += f"; another process has {address} here"
        raise ValueError(f"listen: this process cannot listen at {', '.join(reasons)}")

    def _answer(self, message: Message) -> Message:
        with self.lock:
            return self.roll.answer(message)
