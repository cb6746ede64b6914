"""Members that look for their next generation, each at a port of this machine, in a thread of its own."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError  # pyright: ignore[reportPrivateImportUsage]

from adloco_dist.members import seat as room
from adloco_dist.members.direct import GenerationStore
from adloco_dist.members.roll import Generation
from adloco_dist.members.seat import Seat
from helpers.commands import foreign_program, wait_until
from helpers.ports import free_port

PATIENCE_SECONDS = 20


def three_of_a_generation(least: int) -> tuple[list[Seat], Generation]:
    seats = [Seat([], "127.0.0.1:0", {}, silence_seconds=5, least=least) for _ in range(3)]
    generation = Generation(1, tuple(seat.address for seat in seats))
    for seat in seats:
        seat.begin(generation)
    return seats, generation


@pytest.fixture
def three() -> Iterator[list[Seat]]:
    """Members of one generation."""
    seats, _ = three_of_a_generation(least=1)
    yield seats
    for seat in seats:
        seat.close()


def found_by(seats: Sequence[Seat], looks: Sequence[Callable[[], Generation | None]]) -> list[Generation]:
    """The generations that these seats begin, each by its look, at the same time."""

    def begin(seat: Seat, look: Callable[[], Generation | None]) -> Generation:
        found = look()
        assert found
        seat.begin(found)
        return found

    threads = ThreadPoolExecutor(len(seats))
    try:
        futures = [threads.submit(begin, *both) for both in zip(seats, looks, strict=True)]
        return [future.result(PATIENCE_SECONDS) for future in futures]
    finally:
        threads.shutdown(wait=False)


def test_all_find_the_same_next_generation(three: list[Seat]) -> None:
    first, *_ = found = found_by(three, [seat.next for seat in three])
    assert found == [first] * 3
    assert (first.number, set(first.members)) == (2, {seat.address for seat in three})


def test_who_takes_the_first_for_gone_and_keeps_the_roll_itself_comes_to_it(three: list[Seat]) -> None:
    """As where the first did not answer in time."""
    one, other, third = three
    before = third.roll.generation
    assert before
    found = found_by(three, [one.next, other.next, lambda: third._preside(before)])
    assert found == [found[0]] * 3


def test_who_takes_the_first_for_gone_and_comes_to_the_second_is_sent_on(three: list[Seat]) -> None:
    one, other, third = three
    before = third.roll.generation
    assert before
    found = found_by(three, [one.next, other.next, lambda: third._attend(other.address, before)])
    assert found == [found[0]] * 3


def test_those_who_are_left_go_on_without_the_first(three: list[Seat]) -> None:
    first, *rest = three
    first.close()
    found = found_by(rest, [seat.next for seat in rest])
    assert found == [found[0]] * 2
    assert set(found[0].members) == {seat.address for seat in rest}


def test_members_that_took_each_other_for_gone_and_are_too_few_come_together() -> None:
    seats, before = three_of_a_generation(least=2)
    found = found_by(seats, [lambda seat=seat: seat._preside(before) for seat in seats])
    assert found == [found[0]] * 3
    assert set(found[0].members) == set(before.members)
    for seat in seats:
        assert not seat.has_returned
        seat.close()


def test_a_member_that_was_cut_off_and_is_too_few_joins_those_who_went_on() -> None:
    (one, other, cut), before = three_of_a_generation(least=2)
    following = Generation(2, before.members[:2], "word")
    for seat in (one, other):
        seat.begin(following)
    found = ThreadPoolExecutor(1).submit(cut._preside, before)
    while cut.address not in one.roll.asking:
        time.sleep(0.001)
    one.begin(one.roll.following(one.address, [other.address], [cut.address], "word"))
    assert found.result(PATIENCE_SECONDS) == one.roll.generation
    assert cut.has_returned
    for seat in (one, other, cut):
        seat.close()


def test_a_process_that_began_anew_beside_others_hears_of_them(three: list[Seat]) -> None:
    """It has looked for them before the network was there: it is alone, and they know its address."""
    anew = Seat([], "127.0.0.1:0", {}, silence_seconds=5, least=1)
    alone = Generation(1, (anew.address,), "word")
    anew.begin(alone)
    assert not anew.others
    first = three[0]
    assert first.roll.generation
    assert first.larger(anew.address, first.roll.generation, 5.0) is None, "that is smaller"
    assert anew.others == [first.address]
    assert anew.larger(first.address, alone, 5.0) == first.roll.generation
    anew.close()


def test_what_one_tells_all_others_read(three: list[Seat]) -> None:
    one, other, _ = three
    generation = one.roll.generation
    assert generation
    told, read = GenerationStore(one, generation), GenerationStore(other, generation)
    told.set("0/1", b"\x00\xff")
    read.wait(["0/1"], timedelta(seconds=PATIENCE_SECONDS))
    assert read.get("0/1") == b"\x00\xff"
    with pytest.raises(DistStoreError, match="0/2 timed out"):
        read.wait(["0/1", "0/2"], timedelta(milliseconds=1))


@pytest.mark.parametrize("what_happens", ["the first leaves", "the generation is over", "another one has begun"])
def test_nobody_waits_for_what_a_generation_that_is_over_would_have_told(three: list[Seat], what_happens: str) -> None:
    one, other, _ = three
    generation = other.roll.generation
    assert generation
    with ThreadPoolExecutor(1) as thread:
        read = GenerationStore(other, generation)
        wait = thread.submit(read.wait, ["0/1"], timedelta(seconds=PATIENCE_SECONDS))
        if what_happens == "the first leaves":
            one.close()
        elif what_happens == "the generation is over":
            one.roll.is_over = True
        else:
            one.begin(Generation(2, (one.address,)))
        with pytest.raises(DistStoreError, match=f"{one.address} does not go on"):
            wait.result()


def test_who_waits_says_which_of_its_places_another_program_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No member can begin at the first one then, and others look for it there in vain."""
    monkeypatch.setattr(room, "SAY_SECONDS", 0.0)
    with foreign_program(0, b"") as port:
        taken, free = f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"
        waiting = Seat([taken, free], None, {}, silence_seconds=5, least=1)
        threads = ThreadPoolExecutor(1)
        looks = threads.submit(waiting.find_place)
        wait_until(lambda: bool(caplog.messages), lambda: "it does not say that it waits")
    assert caplog.messages == [f"members: {free} waits for others at {taken}, {free}; another process has {taken} here"]
    first = Seat([taken], None, {}, silence_seconds=5, least=1)  # the other program is gone
    first.begin(first.find_place())
    wait_until(lambda: bool(first.roll.asking), lambda: "nobody came")
    following, newcomers = found_by([first, waiting], [first.next, lambda: looks.result(PATIENCE_SECONDS)])
    assert following == newcomers
    threads.shutdown()
    for one in (first, waiting):
        one.close()
