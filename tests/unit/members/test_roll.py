"""The state machine of members, without processes: who is in which generation, and who joins whom."""

import random
from dataclasses import dataclass, field
from itertools import permutations

import pytest

from adloco_dist.members.calls import Message, Server, call, split
from adloco_dist.members.roll import Generation, Roll

FACTS = {"updates_per_round": "4"}


def new_roll(clock: "Clock | None" = None) -> Roll:
    return Roll(FACTS, clock or Clock())


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def message(ask: str, by: str, generation: Generation | None = None) -> Message:
    return {"ask": ask, "by": by, "generation": generation and generation.name, "facts": new_roll().digest}


def test_a_newcomer_is_in_the_next_generation_and_asks_no_more() -> None:
    roll = new_roll()
    roll.begin(Generation(1, ("a:1",)))
    first = roll.generation
    assert roll.answer(message("place", "b:1", first))["generation"]["members"] == ("a:1",)
    following = roll.following("a:1", [], list(roll.asking))
    assert following == Generation(2, ("a:1", "b:1"))
    roll.begin(following)
    assert not roll.asking
    roll.answer(message("place", "b:1", first))
    assert not roll.asking, "it has its place"


def test_a_newcomer_with_other_facts_hears_them_and_has_no_place() -> None:
    roll = new_roll()
    roll.begin(Generation(1, ("a:1",)))
    reply = roll.answer({**message("place", "b:1", roll.generation), "facts": "others"})
    assert reply["facts"] == FACTS
    assert not roll.asking
    assert not roll.answer(message("place", "b:1", roll.generation))["facts"]


def test_who_asked_for_a_place_and_has_none_asks_again() -> None:
    """It may be gone, and is nobody for whom each generation should end."""
    roll = new_roll()
    roll.begin(Generation(1, ("a:1",)))
    roll.answer(message("place", "b:1", roll.generation))
    roll.begin(Generation(2, ("a:1",)))
    assert not roll.asking


def test_who_calls_and_is_no_member_is_kept_in_mind() -> None:
    roll = new_roll()
    generation = Generation(1, ("a:1", "b:1"))
    roll.begin(generation)
    roll.answer(message("beat", "b:1", generation))
    for number in range(100):
        roll.answer(message("who", f"c{number}:1"))
    assert list(roll.met) == [f"c{number}:1" for number in range(36, 100)], "the last of them"
    roll.begin(Generation(2, ("a:1", "b:1", "c99:1")))
    assert "c99:1" not in roll.met


def test_what_is_said_of_another_generation_changes_nothing() -> None:
    roll = new_roll()
    old, new = Generation(1, ("a:1", "b:1")), Generation(2, ("a:1", "b:1"))
    roll.begin(old)
    roll.begin(new)
    for ask in ("here", "beat", "over"):
        before = dict(roll.heard)
        assert not roll.answer(message(ask, "b:1", old))["is_over"]
        assert (roll.here, roll.heard) == (set(), before)
    assert roll.answer(message("here", "b:1", new))["is_over"]


def test_a_member_is_silent_once_nothing_was_heard_of_it_for_long() -> None:
    clock = Clock()
    roll = new_roll(clock)
    generation = Generation(1, ("a:1", "b:1", "c:1"))
    roll.begin(generation)
    clock.now = 5.0
    roll.answer(message("beat", "b:1", generation))
    clock.now = 11.0
    assert roll.silent(10.0) == ["a:1", "c:1"]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (3, 1), (1, 1)])
def test_of_two_parts_one_joins_the_other(sizes: tuple[int, int]) -> None:
    first, second = (Generation(5, tuple(f"{name}:{i}" for i in range(n))) for name, n in zip("ab", sizes, strict=True))
    assert first.precedes(second) != second.precedes(first)
    assert first.precedes(second) == (sizes[0] >= sizes[1])


@dataclass
class World:
    """Members whose rolls are theirs, and a network that says who lives; every step is one of what `Seat` does."""

    rolls: dict[str, Roll] = field(default_factory=dict[str, Roll])
    alive: set[str] = field(default_factory=set[str])

    @property
    def generation(self) -> Generation:
        """That of those who live, newcomers aside."""
        (found,) = {generation for address in self.alive if (generation := self.rolls[address].generation)}
        return found

    def regroup(self) -> Generation:
        """All who are left come to the first of their generation that lives, which makes the next one."""
        before = self.generation
        present = [address for address in before.members if address in self.alive]
        first = self.rolls[present[0]]
        for address in random.Random(len(present)).sample(present[1:], len(present) - 1):
            first.answer(message("here", address, before))
        newcomers = [address for address in first.asking if address in self.alive]
        following = first.following(present[0], list(first.here), newcomers)
        for address in following.members:
            self.rolls[address].begin(following)
        return following


@pytest.mark.parametrize("seed", range(50))
def test_whoever_goes_and_comes_those_who_live_are_in_one_generation(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    world.rolls["m0:1"] = new_roll()
    world.rolls["m0:1"].begin(Generation(1, ("m0:1",)))
    world.alive.add("m0:1")
    number = 1
    for step in range(1, 40):
        generation = world.generation
        if chance.random() < 0.5 and len(world.alive) > 1:  # one or two go, the first included
            for gone in chance.sample(sorted(world.alive), min(len(world.alive) - 1, chance.choice([1, 2]))):
                world.alive.discard(gone)
        else:
            newcomer = f"m{step}:1"
            world.rolls[newcomer] = new_roll()
            world.alive.add(newcomer)
            first = next(address for address in generation.members if address in world.alive)
            world.rolls[first].answer(message("place", newcomer, generation))
            if chance.random() < 0.2 and first != newcomer and len(world.alive) > 2:
                world.alive.discard(newcomer)  # it goes before it has its place
        alive_before = [address for address in generation.members if address in world.alive]
        following = world.regroup()
        number += 1
        assert following.number == number
        assert set(following.members) == world.alive
        assert list(following.members[: len(alive_before)]) == alive_before, "who was there keeps its order"


def test_numbers_of_members_do_not_depend_on_the_order_in_which_they_come() -> None:
    members = ("a:1", "b:1", "c:1", "d:1")
    before = Generation(3, members)
    for order in permutations(members[1:]):
        roll = new_roll()
        roll.begin(before)
        for address in order:
            roll.answer(message("here", address, before))
        assert roll.following("a:1", list(roll.here), []).members == members


@pytest.mark.parametrize("address", ["nowhere", "host:", ":80", "host:port", "host:70000", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is no HOST:PORT"):
        split(address)


def test_a_server_answers_and_survives_what_is_no_message() -> None:
    server = Server("127.0.0.1", 0, lambda message: {"said": message["ask"]})
    try:
        with pytest.raises(OSError, match="closed"):
            call(server.address, {"nothing": 1}, 5.0)
        assert call(server.address, {"ask": "who"}, 5.0) == {"said": "who"}
    finally:
        server.close()
    with pytest.raises(ConnectionError):
        call(server.address, {"ask": "who"}, 5.0)


def test_of_a_network_that_is_split_one_part_at_most_goes_on() -> None:
    """Whoever has ended, and whatever each part knows of that."""
    chance = random.Random(0)
    num_held = 0
    for _ in range(3000):
        members = tuple(f"m:{number}" for number in range(chance.randint(1, 7)))
        generation = Generation(1, members)
        sides = {member: chance.randint(0, 2) for member in members}
        ended = {member for member in members if sides[member] == 2}
        held = []
        for side in (0, 1):
            part = {member for member in members if sides[member] == side}
            known = {member for member in ended if chance.random() < 0.5}
            held.append(bool(part) and generation.is_held_by(part, known))
        assert not all(held), (members, sides)
        num_held += any(held)
    assert num_held > 1000


def test_half_of_the_members_go_on_with_the_first_or_without_those_that_have_ended() -> None:
    generation = Generation(4, ("a:1", "b:1"))
    assert generation.is_held_by(["a:1"], [])
    assert not generation.is_held_by(["b:1"], [])
    assert generation.is_held_by(["b:1"], ["a:1"])
    assert generation.is_held_by(["b:1", "c:1"], ["a:1"]), "with newcomers"


def test_at_most_so_many_have_a_place() -> None:
    roll = new_roll()
    roll.begin(Generation(1, ("a:1", "b:1")))
    assert roll.following("a:1", ["b:1"], ["c:1", "d:1"], most=3).members == ("a:1", "b:1", "c:1")
    assert roll.following("a:1", ["b:1"], ["c:1"], most=1).members == ("a:1", "b:1"), "nobody who is in is sent away"
