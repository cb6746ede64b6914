"""Who averages together, as every member keeps it: plain values, and what a member answers the others.

Those who average together are a *generation*: a numbered list of members, by address. The first of them keeps the roll:
the others tell it that they live, newcomers ask it for a place, and when a generation is over, all who are left come to
it for the next one. If the first is gone they come to the second, and so on, so that no member is needed.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

Message = dict[str, Any]
Clock = Callable[[], float]
MOST_MET = 64
"""Callers that are kept in mind."""


@dataclass(frozen=True)
class Generation:
    """Members that average together."""

    number: int
    """From 1 on; one more than that of the generation before."""
    members: tuple[str, ...]
    """Addresses, HOST:PORT; the first keeps the roll."""
    made_by: str = ""
    """A word of the process that has made it: another one may have had the address and the number before."""

    @property
    def name(self) -> str:
        """Differs also between generations of one number, which a split network may have."""
        return f"{self.number}@{self.members[0]} {self.made_by}"

    def precedes(self, other: "Generation") -> bool:
        """Whether those of the other one should join this one, where a network that was split is whole again: the more
        members; of as many the later generation, then the lower address."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, str]:
        return -len(self.members), -self.number, self.members[0]

    def is_held_by(self, members: Collection[str], ended: Collection[str]) -> bool:
        """Whether these members, some of this generation's, may go on without the others, while nobody else can: they
        are more than half of those whose processes are not known to have `ended`; or half, with the first of them."""
        left = [member for member in self.members if member in members or member not in ended]
        stay = [member for member in left if member in members]
        return 2 * len(stay) > len(left) or (2 * len(stay) == len(left) and left[0] in stay)

    @classmethod
    def of(cls, message: Mapping[str, Any] | None) -> "Generation | None":
        """As a message has it."""
        return cls(message["number"], tuple(message["members"]), message["made_by"]) if message else None


@dataclass
class Roll:
    """What a member knows of its generation, and answers whoever calls.

    Attributes:
        generation: the newest that this member is in; None: none yet.
        is_over: whether its members are to come for the next one.
        ends_after: the outer step after which they do so, as newcomers wait; None: nobody does.
        here: who has come for the next one.
        asking: newcomers that wait for a place, in their order.
        heard: when each other member was last heard of; for the first member.
        stored: what members tell each other to connect; with the first member.
        met: who has called, and is no member: where a network was split, some may be of its other part.
    """

    facts: Mapping[str, str]
    """What members have to have in common."""
    clock: Clock
    terms: Mapping[str, Any] | None = None
    """What is told to those who want to take part; None: nothing is known yet."""
    generation: Generation | None = None
    is_over: bool = False
    has_left: bool = False
    """Whether this member takes part in nothing any more."""
    moved_to: str | None = None
    """Who keeps the roll that the members of this generation are to join; None: they stay."""
    comes_to: str | None = None
    """To whom this member has come for the next generation; None: to nobody yet."""
    ends_after: int | None = None
    here: set[str] = field(default_factory=set[str])
    asking: dict[str, None] = field(default_factory=dict[str, None])
    heard: dict[str, float] = field(default_factory=dict[str, float])
    stored: dict[str, str] = field(default_factory=dict[str, str])
    met: dict[str, None] = field(default_factory=dict[str, None])

    def begin(self, generation: Generation) -> None:
        """A generation begins. Who has no place in it and still waits for one asks again."""
        self.generation, self.is_over, self.ends_after, self.here = generation, False, None, set()
        self.moved_to, self.comes_to, self.stored = None, None, {}
        self.asking, self.met = {}, {address: None for address in self.met if address not in generation.members}
        self.heard = dict.fromkeys(generation.members, self.clock())

    def answer(self, message: Message) -> Message:
        """What this member answers; each message has an "ask", and who sends it, "by"."""
        by, of_this = message["by"], self.generation is not None and message.get("generation") == self.generation.name
        if message["ask"] == "terms":
            return {"terms": self.terms and dict(self.terms)}
        if self.generation and by not in self.generation.members:
            self.met.pop(by, None)
            self.met[by] = None
            if len(self.met) > MOST_MET:
                del self.met[next(iter(self.met))]
        match message["ask"]:
            case "place" if of_this and message["facts"] == self.digest:
                self.asking[by] = None
            case "here" if of_this:
                self.here.add(by)
                self.is_over = True
            case "beat" if of_this:
                self.heard[by] = self.clock()
            case "store" if of_this:
                self.stored |= message["stored"]
            case _:
                pass
        return {
            "generation": self.generation and asdict(self.generation),
            "is_over": self.is_over,
            "has_left": self.has_left,
            "moved_to": self.moved_to,
            "comes_to": self.comes_to,
            "ends_after": self.ends_after,
            "facts": dict(self.facts) if message.get("facts", self.digest) != self.digest else {},
            "stored": dict(self.stored) if message["ask"] == "store" else {},
        }

    @cached_property
    def digest(self) -> str:
        """Of the facts."""
        return hashlib.blake2b(json.dumps(dict(self.facts), sort_keys=True).encode(), digest_size=16).hexdigest()

    def silent(self, seconds: float) -> list[str]:
        """The members that nothing was heard of for so long."""
        return [address for address, at in self.heard.items() if self.clock() - at > seconds]

    def following(
        self, own: str, here: Sequence[str], newcomers: Sequence[str], made_by: str = "", most: int | None = None
    ) -> Generation:
        """The next generation, whose roll this member keeps: those who have come, in their order, and newcomers, `most`
        of them together at most."""
        assert self.generation
        stay = [address for address in self.generation.members if address in here and address != own]
        come = [address for address in newcomers if address != own and address not in stay]
        members = (own, *stay, *come)
        return Generation(self.generation.number + 1, members[: max(most, 1 + len(stay))] if most else members, made_by)
