"""A user's own streams that are not what they say: found from a few sequences before training, and honest ones not."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from adloco_dist.config import SettingsError, Shards
from adloco_dist.data.items import ItemBatch
from adloco_dist.data.own import OwnSplits, own_splits
from adloco_dist.data.own_streams import NUM_IN_DOUBT
from adloco_dist.data.protocols import Cursor
from helpers.reading import read_round, states_of

pytestmark = pytest.mark.stranger
NUM_ROWS = 60


class Rows:
    """Every `count`-th row from the `index`-th on; honest."""

    def __init__(self, index: int, count: int) -> None:
        self.rows, self.next = self.part(index, count), 0

    def part(self, index: int, count: int) -> list[Any]:
        return list(range(index, NUM_ROWS, count))

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]
        self.next = 0

    def state_dict(self) -> Any:
        return {"next": self.next}

    def load_state_dict(self, state_dict: Any) -> None:
        self.next = state_dict["next"]


class Frozen(Rows):
    def state_dict(self) -> Any:
        return {"next": 0}


class Behind(Rows):
    """The state before the sequence that was given."""

    def state_dict(self) -> Any:
        return {"next": max(0, self.next - 1)}


class Ahead(Rows):
    """The state of a reader that reads ahead of what it gives."""

    def state_dict(self) -> Any:
        return {"next": self.next + 7}


class AtTheEnd(Rows):
    def state_dict(self) -> Any:
        return {"next": len(self.rows)}


class OnceOnly(Rows):
    """As `datasets` before 5.1: the state stays where it was when it is resumed."""

    loaded: int | None = None

    def state_dict(self) -> Any:
        return {"next": self.next if self.loaded is None else self.loaded}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.loaded = self.next


class Forgetful(Rows):
    def load_state_dict(self, state_dict: Any) -> None:
        pass


class Raising(Rows):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("epoch")


class Shuffled(Rows):
    """In an order of its own, of which the state knows nothing."""

    def part(self, index: int, count: int) -> list[Any]:
        return random.sample(super().part(index, count), NUM_ROWS // count)


SHARED = Rows(0, 1)


def loaded(make: Callable[[int, int], Any]) -> OwnSplits:
    def load() -> Any:
        return make, [0]

    return own_splits(load)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Frozen, "gives a sequence again that was read before: its state does not advance after load_state_dict"),
        (Behind, "gives a sequence again that was read before: its state does not advance after load_state_dict"),
        (Forgetful, "gives a sequence again that was read before"),
        (Ahead, "gives another sequence than the one that followed after load_state_dict"),
        (AtTheEnd, "ends after load_state_dict, so that a resumed run would train on other data"),
        (OnceOnly, "gives a sequence again .* when it is resumed a second time"),
        (Raising, "cannot be resumed .*epoch.*; load_state_dict must take what state_dict returned"),
        (Shuffled, "begins with other sequences whenever it is made.*; seed whatever it draws or shuffles with"),
        (lambda index, count: SHARED, "is the same object at every call; it must make a new one"),
    ],
)
def test_a_state_that_lies_is_refused(make: Callable[[int, int], Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=rf"^data=load: train: stream\(0, 1\) {expected}") as refused:
        loaded(make)
    assert "\n" not in str(refused.value)


class Whole(Rows):
    """The whole of the data, whichever part is asked for."""

    def part(self, index: int, count: int) -> list[Any]:
        return super().part(0, 1)


class Overlapping(Rows):
    """From the `index`-th row on, every one."""

    def part(self, index: int, count: int) -> list[Any]:
        return list(range(index, NUM_ROWS))


class Halved(Rows):
    """Made for two parts."""

    def part(self, index: int, count: int) -> list[Any]:
        return super().part(index % 2, 2)


@pytest.mark.parametrize(
    ("make", "workers", "parts"),
    [(Whole, 2, "0, 2 1, 2"), (Overlapping, 2, "0, 2 1, 2"), (Halved, 3, "0, 3 2, 3"), (Whole, 5, "0, 5 1, 5")],
)
def test_parts_that_read_the_same_are_refused(make: Callable[[int, int], Any], workers: int, parts: str) -> None:
    one, other = (f"stream({numbers})" for numbers in (parts[:4], parts[5:]))
    with pytest.raises(SettingsError) as refused:
        loaded(make).train.check_size(1, workers, Shards.disjoint)
    assert f"data=load: {one} and {other} give the same sequences; stream(index, count) must" in str(refused.value)


def test_trainers_that_share_their_data_may_read_the_same() -> None:
    loaded(Whole).train.check_size(4, 1, Shards.shared)


class Drawn(Rows):
    """Sequences of random numbers, from torch."""

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.rand(3) for _ in super().__iter__())


class Constant(Rows):
    def part(self, index: int, count: int) -> list[Any]:
        return [torch.zeros(2)] * 20


class Headed(Rows):
    """Parts that begin alike, as files with one header do."""

    def part(self, index: int, count: int) -> list[Any]:
        return ["licence", "author", "year", "", *super().part(index, count)]


class Single(Rows):
    def part(self, index: int, count: int) -> list[Any]:
        return [index]


@pytest.mark.parametrize("make", [Rows, Drawn, Constant, Headed, Single])
def test_honest_streams_are_not_suspected(make: Callable[[int, int], Any]) -> None:
    splits = loaded(make)
    splits.train.check_size(2, 2, Shards.disjoint)
    assert splits.notes == ()


def test_a_stream_with_a_digest_of_its_own_may_be_another_one_each_time_which_is_said() -> None:
    class Named:
        digest = "whatever the sensors say"

        def __call__(self, index: int, count: int) -> Any:
            return Shuffled(index, count)

    (note,) = loaded(Named()).notes
    assert "begins with other sequences whenever it is made: a resumed run does not repeat what was read" in note


class Counted(Rows):
    """Counts what is read of all streams."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            Counted.num_read += 1
            yield row


def test_little_is_read_before_training() -> None:
    loaded(Counted).train.check_size(4, 2, Shards.disjoint)
    assert 8 <= Counted.num_read <= 24 < NUM_IN_DOUBT


class FromItsState(Rows):
    """As a stream that wraps a streaming set of `datasets`: every pass begins where a state was loaded."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        self.next = self.start
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]

    def load_state_dict(self, state_dict: Any) -> None:
        self.start = self.next = state_dict["next"]


class EndsOnce(Rows):
    """Ends at once where the state of its end was loaded, and begins again when it is iterated over again."""

    def __iter__(self) -> Iterator[Any]:
        if self.next > len(self.rows):
            self.next = 0
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]
        self.next = len(self.rows) + 1


@pytest.mark.parametrize("make", [Rows, FromItsState, EndsOnce])
@pytest.mark.parametrize("size", [7, 10, 15])
def test_passes_after_a_resumed_one_are_whole(make: Callable[[int, int], Any], size: int) -> None:
    def read(cursors: dict[int, Cursor]) -> list[Sequence[Any]]:
        taken = read_round(cursors, {0: 2}, 1, {0: size})
        return [batch.items for one in taken.values() for batch in one if isinstance(batch, ItemBatch)]

    undisturbed = dict(enumerate(loaded(make).train.deal(1, 2, Shards.disjoint, seed=0)))
    resumed, seen = undisturbed, Counter[int]()
    for round_ in range(16):
        if round_ % 4 == 2:
            resumed = dict(loaded(make).train.restore(states_of(resumed), 1, Shards.disjoint, seed=0))
        expected = read(undisturbed)
        seen.update(row for batch in expected for row in batch)
        if resumed is not undisturbed:
            assert read(resumed) == expected
    assert max(seen.values()) - min(seen.values()) <= 1
    assert len(seen) == NUM_ROWS
