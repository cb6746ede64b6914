"""A user's own data: every sequence once per epoch, the same after any interruption and merge; what is refused."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from adloco_dist.config import SettingsError, Shards
from adloco_dist.data.items import ItemBatch, moved
from adloco_dist.data.own import own_splits
from adloco_dist.data.own_streams import decode_state, encode_state
from adloco_dist.data.protocols import Batch, Cursor, Splits
from adloco_dist.data.streams import StreamError
from helpers.reading import read_round, states_of

NUM_ITEMS = 61


class Items(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, num_items: int = NUM_ITEMS, scale: float = 1.0) -> None:
        self._num_items, self._scale = num_items, scale

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_items:
            raise IndexError(index)
        return {"number": index, "x": torch.full((3,), index * self._scale)}


class Numbers:
    """One part of the numbers, which reads ahead of what it gives; its state is JSON."""

    def __init__(self, index: int, count: int, num_items: int = NUM_ITEMS) -> None:
        self._numbers, self._next = range(index, num_items, count), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        ahead = [self._item(number) for number in self._numbers[self._next :]]
        for item in ahead:
            self._next += 1
            yield item
        self._next = 0

    def _item(self, number: int) -> dict[str, Any]:
        return {"number": number, "x": torch.tensor([float(number)])}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


class Shuffled(Numbers):
    """In a fresh order every epoch; the state has a tensor and a tuple, and is changed in place."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, count)
        self._state = {"epoch": torch.zeros(1, dtype=torch.int64), "left": ()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._state["left"]:
            self._state["epoch"] += 1
            order = random.Random(int(self._state["epoch"])).sample(self._numbers, len(self._numbers))
            self._state["left"] = tuple(order)
        while left := self._state["left"]:
            self._state["left"] = left[1:]
            yield self._item(left[0])

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


LOADS: dict[str, Callable[[], Any]] = {
    "items": lambda: (Items(), Items(7)),
    "list": lambda: ([{"number": number} for number in range(NUM_ITEMS)], [{"number": 0}]),
    "stream": lambda: (Numbers, Items(7)),
    "shuffled": lambda: (Shuffled, Items(7)),
}


def numbers(batch: Batch) -> list[int]:
    assert isinstance(batch, ItemBatch)
    return batch.collated["number"].tolist()


def all_numbers(taken: Mapping[tuple[int, int], list[Batch]]) -> list[int]:
    return [number for batches in taken.values() for batch in batches for number in numbers(batch)]


def deal(splits: Splits, num_trainers: int, workers: int, shards: Shards = Shards.disjoint) -> dict[int, Cursor]:
    splits.train.check_size(num_trainers, workers, shards)
    return dict(enumerate(splits.train.deal(num_trainers, workers, shards, seed=3)))


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_resumes_with_the_same_sequences_in_the_middle_of_a_round_and_after_merges(kind: str, seed: int) -> None:
    """Another process that restores the cursors reads the very same; workers take unequal numbers of updates."""
    rng = random.Random(seed)
    cursors = deal(own_splits(LOADS[kind]), 3, 2)
    workers = dict.fromkeys(cursors, 2)
    for _ in range(8):
        sizes = {trainer: rng.randint(1, 9) for trainer in cursors}
        unequal = {trainer: [rng.randint(1, 3) for _ in range(workers[trainer])] for trainer in cursors}
        states = states_of(cursors)
        expected = read_round(cursors, workers, 0, sizes, unequal)
        midway = own_splits(LOADS[kind]).train.restore(states, 3, Shards.disjoint, seed=3)
        for (trainer, worker), batches in expected.items():
            last = midway[trainer].batch(worker, len(batches) - 1, sizes[trainer], unequal[trainer])
            assert numbers(last) == numbers(batches[-1])
        again = own_splits(LOADS[kind]).train.restore(states, 3, Shards.disjoint, seed=3)
        assert all_numbers(read_round(again, workers, 0, sizes, unequal)) == all_numbers(expected)
        assert states_of(again) == states_of(cursors)
        if len(cursors) > 1 and rng.random() < 0.4:
            survivor, ended = rng.sample(list(cursors), 2)
            cursors[survivor] = cursors[survivor].unite([cursors.pop(ended)])
            workers[survivor] = rng.choice([1, workers[survivor] + workers[ended], 7])


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_each_sequence_is_used_once_per_epoch(kind: str, num_workers: int) -> None:
    """One trainer's streams of equal length end their epochs together."""
    (cursor,) = deal(own_splits(LOADS[kind]), 1, 1).values()
    seen: list[int] = []
    while len(seen) < 3 * NUM_ITEMS:
        seen += all_numbers(read_round({0: cursor}, {0: num_workers}, 2, {0: 3}))
    assert cursor.position == len(seen)
    counts = Counter(seen)
    assert set(counts) == set(range(NUM_ITEMS))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("kind", LOADS)
def test_a_merge_continues_with_what_its_members_left_unread(kind: str) -> None:
    cursors = deal(own_splits(LOADS[kind]), 2, 1)
    first = all_numbers(read_round(cursors, {0: 1, 1: 1}, 1, {0: 5, 1: 9}))
    union = {0: cursors[0].unite([cursors[1]])}
    rest = all_numbers(read_round(union, {0: 2}, 1, {0: 21}))
    assert len(set(first)) == 14
    assert len(set(first + rest)) == 14 + 42, "no sequence was read twice"


def test_shared_data_is_the_whole_of_it_for_every_trainer() -> None:
    for kind in ("items", "stream"):
        cursors = deal(own_splits(LOADS[kind]), 2, 1, Shards.shared)
        taken = read_round(cursors, {0: 1, 1: 1}, 1, {0: NUM_ITEMS, 1: NUM_ITEMS})
        assert sorted(numbers(taken[0, 0][0])) == sorted(numbers(taken[1, 0][0])) == list(range(NUM_ITEMS))


def test_digests() -> None:
    digests = [own_splits(load).digest for load in LOADS.values()]
    assert digests == [own_splits(load).digest for load in LOADS.values()]
    changed: list[Callable[[], Any]] = [
        lambda: (Items(NUM_ITEMS - 1), Items(7)), lambda: (Items(scale=2.0), Items(7)), lambda: (Items(), Items(8)),
    ]  # fmt: skip
    assert len({own_splits(load).digest for load in (LOADS["items"], *changed)}) == 4

    class Noisy(Items):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.rand(2)}

    assert own_splits(lambda: (Noisy(), Items(7))).digest == own_splits(lambda: (Noisy(), Items(7))).digest


def test_a_users_digest_wins() -> None:
    class Named(Items):
        digest = "the first edition"

    assert own_splits(lambda: (Named(9), Items(7))).digest == own_splits(lambda: (Named(), Items(7))).digest


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


def test_an_item_batch() -> None:
    batch = ItemBatch([{"x": torch.full((2,), number)} for number in range(7)])
    assert [len(part) for part in batch.split(3)] == [3, 3, 1]
    assert [len(part) for part in batch.chunks(3)] == [3, 2, 2]
    for parts in (batch.split(3), batch.chunks(3)):
        assert torch.equal(torch.cat([part.collated["x"] for part in parts]), batch.collated["x"])
    assert batch.to(torch.device("meta")).split(3)[0].collated["x"].device.type == "meta"
    nested = moved({"a": [Pair(torch.zeros(1), "b")], "c": (torch.ones(1), None)}, torch.device("meta"))
    assert nested["a"][0].image.device.type == nested["c"][0].device.type == "meta"
    assert (nested["a"][0].name, nested["c"][1]) == ("b", None)


def test_items_are_collated_by_the_users_function_and_only_when_asked_for() -> None:
    calls: list[int] = []

    def collate(items: list[Any]) -> torch.Tensor:
        calls.append(len(items))
        return torch.nn.utils.rnn.pad_sequence(items)

    splits = own_splits(lambda: ([torch.ones(n) for n in (1, 2, 3)], [torch.ones(1)]), collate)
    calls.clear()
    batch = splits.validation.batch(np.array([0])).split(1)[0]
    assert calls == []
    assert isinstance(batch, ItemBatch)
    assert batch.collated.shape == batch.collated.shape == (1, 1)
    assert calls == [1]


@pytest.mark.parametrize(
    "state", [{"next": 3, "rows": [1.5, None, "x"]}, (1, 2), {1: "one"}, float("nan"), torch.ones(2)]
)
def test_states_keep_their_types(state: Any) -> None:
    kept = decode_state(encode_state(state))
    assert type(kept) is type(state)
    assert str(kept) == str(state)


def test_a_stream_that_does_not_begin_again_is_an_error() -> None:
    class Once(Numbers):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            while self._next < len(self._numbers):
                self._next += 1
                yield self._item(self._numbers[self._next - 1])

    (cursor,) = deal(own_splits(lambda: (Once, Items(7))), 1, 1).values()
    with pytest.raises(StreamError, match=r"stream\(0, 1\) ends without a sequence; it must begin again"):
        cursor.batch(0, 0, NUM_ITEMS + 1, (1,))


class Stateless:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class WithObject(Numbers):
    def state_dict(self) -> Any:
        return {"random": random.Random(0)}


class Failing(Items):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [
        (
            Stateless(),
            Items(7),
            "train is a Stateless without __len__, __getitem__, and without state_dict, load_state",
        ),
        (
            Numbers(0, 1),
            Items(7),
            "train is one Numbers with a state, but every worker reads its own; return a function",
        ),
        (
            lambda index, count: Stateless(),
            Items(7),
            r"stream\(0, 1\) is a Stateless without state_dict, load_state_dict",
        ),
        (lambda index, count: Numbers(index, count, 0), Items(7), r"train: stream\(0, 1\) is empty"),
        (
            WithObject,
            Items(7),
            r"train: state_dict\(\) of stream\(0, 1\) holds a Random; it must hold nothing but numbers",
        ),
        (Items(0), Items(7), "train is empty; return data with at least one item"),
        (Items(), Items(0), "validation is empty"),
        (Items(), Numbers(0, 1), "validation is a Numbers without __len__, __getitem__; give it a length"),
        (Failing(), Items(7), r"train\[0\] raises the disk is gone; items must have the numbers 0 to 60"),
        ([torch.ones(1), torch.ones(2)], Items(7), r"train: items cannot be collated .*; give launch a collate="),
    ],
)
def test_what_is_refused(train: Any, validation: Any, expected: str) -> None:
    def load() -> Any:
        return train, validation

    with pytest.raises(SettingsError, match=f"^data=load: {expected}") as refused:
        own_splits(load)
    assert "\n" not in str(refused.value)


def test_one_data_set_instead_of_two_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"returned a Items; return two data sets, \(train, validation\)"):
        own_splits(Items)


def test_fewer_sequences_than_workers_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"shard has 30 sequences \(61 in 2 shards\), less than one for each"):
        deal(own_splits(LOADS["items"]), 2, 31)
    with pytest.raises(SettingsError, match=r"stream\(61, 62\) is empty; use fewer trainers or workers"):
        deal(own_splits(LOADS["stream"]), 2, 31)
