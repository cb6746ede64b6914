"""A process as the others reach it: it answers them, and finds the generation that it is in next."""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from adloco_dist.members.calls import Message, address_towards, call, serve, split
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
        least: as many members have to be there.
        most: as many may be there; None: any number.
        mute: when others have last not answered in time, by the monotonic clock.
        deadline: when, by the monotonic clock, this member has found a place or gives up; None: it waits.
        wait_seconds: how long members that are too few wait for others; None: for ever.
    """

    deadline: float | None = None
    wait_seconds: float | None = None

    def __init__(
        self,
        meet: Sequence[str],
        listen: str | None,
        facts: Mapping[str, str],
        silence_seconds: float,
        least: int,
        patience_seconds: float = 1800.0,
        most: int | None = None,
        is_one: bool = False,
        own_host: str | None = None,
    ) -> None:
        """Arguments as of `Members`; a ValueError of one line says that nobody can listen there.

        Args:
            patience_seconds: how long a member that lives is waited for.
            most: as many members may be there; more wait. None: any number.
            is_one: whether one part at most of a network that is split goes on, whatever `least` is.
            own_host: where the others reach this member if it listens at none of `meet`; None: its address on the way
                there.
        """
        self._meet, self._silence, self._patience = meet, silence_seconds, patience_seconds
        self.least, self.most, self._is_one = least, most, is_one
        self._word = secrets.token_hex(4)
        """Of this process."""
        self.roll, self.lock = Roll(facts, time.monotonic), threading.Condition()
        own = own_host or (address_towards(split(meet[0])[0]) if meet else None) or LOOPBACK
        ports = [*{port for _, port in map(split, meet)}, 0]  # where others may guess it, if that can be
        places = [listen] if listen else list(dict.fromkeys([*meet, *(f"{own}:{port}" for port in ports)]))
        self._server, self._taken = serve(places, self._answer)
        """The latter is what a line about a wait says of the addresses that other processes of this machine have."""
        self.address = self._server.address
        self._lost: list[str] = []
        """Members that were there in earlier generations, and are not."""
        self.mute: dict[str, float] = {}
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
        is_mute = time.monotonic() - self.mute.get(address, float("-inf")) < self._silence
        try:
            reply = call(address, message, seconds or (LAST_SECONDS if is_mute else self._silence))
        except (ConnectionError, ValueError):
            self.mute.pop(address, None)
            return None
        except OSError:  # too late, or there is no way to its machine
            self.mute[address] = time.monotonic()
            return None
        self.mute.pop(address, None)
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
                if self.least == 1:
                    return alone
                self.begin(alone)
                return self._preside(alone)
            if time.monotonic() > said_at:
                said_at = float("inf")
                log.warning("members: %s waits for others at %s%s", self.address, ", ".join(self._meet), self._taken)
            self._pause()

    def _pause(self) -> None:
        """Between two looks; raises a TimeoutError after the deadline."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError("the others have not come")
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
            self._pause()
        return None

    def _come_to(self, first: str) -> None:
        with self.lock:
            self.roll.comes_to = first

    def _preside(self, before: Generation) -> Generation:
        """Wait for all who are left, and make the next generation of them and of newcomers."""
        begin, misses, order = time.monotonic(), Counter[str](), before.members.index
        gone, ended, apart = set[str](), set[str](), set[str]()
        said_at = begin + SAY_SECONDS
        self._come_to(self.address)
        while True:
            for address in {*before.members} - self.roll.here - gone - {self.address}:
                reply = self.ask(address, "who", seconds=min(LAST_SECONDS, self._silence))
                newest = Generation.of(reply["generation"]) if reply and not reply["has_left"] else None
                misses[address] += 1
                if reply is None and address in self.mute and misses[address] < MISSES:
                    continue
                if newest is None or newest.name != before.name or time.monotonic() - begin > self._patience:
                    gone.add(address)
                    if address in self.mute:
                        apart.add(address)
                    elif address not in apart and (newest is None or newest.number <= before.number):
                        ended.add(address)  # another process may have its address; who was apart may have gone on
                elif order(address) < order(self.address):  # it seemed to be gone, here alone
                    if found := self._attend(address, before):
                        return found
                    self._come_to(self.address)
                is_larger = newest is not None and len(newest.members) > len(self.roll.here)
                is_later = newest is not None and newest.number > before.number
                if newest and newest.name != before.name and (is_later if self._is_one else is_larger):
                    return self._wait_for_place(newest) or self.find_place()  # they have gone on without this one
            with self.lock:
                here, asking = list(self.roll.here), list(self.roll.asking)
            if gone.union(here, [self.address]).issuperset(before.members):
                newcomers = [address for address in asking if address not in here and self.ask(address, "who")]
                following = self.roll.following(self.address, here, newcomers, self._word, self.most)
                may_go_on = not self._is_one or before.is_held_by(following.members, ended)
                if len(following.members) >= self.least and may_go_on:
                    return following
                gone.clear()  # a network that was split may be whole again
                if self.wait_seconds is not None and self.deadline is None:
                    self.deadline = time.monotonic() + self.wait_seconds
                for address in self.others:
                    other = self.larger(address, following, LAST_SECONDS)
                    if other and (place := self._wait_for_place(other)):
                        return place
                if time.monotonic() > said_at:
                    said_at = float("inf")
                    log.warning("members: %d are there, of least=%d; waiting", len(following.members), self.least)
            self._pause()

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
            self._pause()

    def _answer(self, message: Message) -> Message:
        with self.lock:
            return self.roll.answer(message)
