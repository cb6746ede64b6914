"""A user's own streams: iterables with a state, which continue from it on any rank; checks of them before training.

The streaming sets of Hugging Face's `datasets` are among them; without `StreamingSet` they lose their place.
"""

import base64
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from adloco_dist.config.errors import SettingsError, refused
from adloco_dist.data.items import Collate, ItemBatch, item_digest
from adloco_dist.data.streams import Stream, StreamError

MakeStream = Callable[[int, int], Any]
"""Called with (index, count): a new iterable over the `index`-th of `count` disjoint parts of the data. It has a state
after the sequences that were read so far, as torchdata's StatefulDataLoader does."""
METHODS = ("__iter__", "state_dict", "load_state_dict")
END = object()
NUM_COMPARED, NUM_IN_DOUBT = 4, 32
"""Sequences of two parts that are compared, and those that are compared where the first ones seem to overlap."""
MIN_OVERLAP = 3
"""Consecutive sequences that overlapping parts have in common."""
BUFFER = "BufferShuffledExamplesIterable"
"""The class of `datasets` that shuffles rows in memory; its state does not contain the rows in that memory."""


@dataclass(frozen=True)
class OwnStreams:
    """A `StreamSource` of a user's streams. They are read in the thread that needs a batch, because a user's code may
    draw torch's random numbers, which every update seeds again; it may read ahead by itself."""

    name: str
    """The user's function, for errors."""
    make: MakeStream
    collate_items: Collate

    def check_states(self) -> str | None:
        """Check that a stream continues from its state; returns a note for the user, or None; raises a SettingsError
        where the sequence after a loaded state is not the one that came after the state was taken, or a stream cannot
        be resumed."""
        name = f"{self.name}: train: stream(0, 1)"
        whole = self.new(0, 1)
        sequences = _digests(whole, 0)
        expected = [*islice(sequences, 1)]
        state = _copied(whole.state_dict())
        expected += islice(sequences, 2)
        other = self.new(0, 1)
        if other is whole:
            rule = "it must make a new one whenever it is called, for several are read side by side"
            raise SettingsError(f"{name} is the same object at every call; {rule}")
        if [*islice(_digests(other, 0), len(expected))] != expected:
            return (
                f"{name} begins with other sequences whenever it is made: a resumed run does not repeat "
                "what was read, and parts may overlap; seed whatever it draws or shuffles with"
            )
        for number, sequence in enumerate(expected[1:], 1):  # the second time from the state of what was resumed
            rule = "load_state_dict must take what state_dict returned, on any rank"
            with refused(f"{name} cannot be resumed", rule):
                resumed = self.new(0, 1)
                resumed.load_state_dict(state)
                follower = next(_digests(resumed, number), None)
                state = _copied(resumed.state_dict())
            if follower != sequence:
                raise SettingsError(f"{name} {_what_is_wrong(follower, expected[:number])}")
        return None

    def check_parts(self, parts: int) -> None:
        """Compares the first few sequences of each part, and raises a SettingsError also where two are the same."""
        first: dict[str, int] = {}
        neighbour: list[str] = []
        for part in range(parts):
            begin = self._begin(part, parts, NUM_COMPARED if part < 2 else 1)
            if not begin:
                rule = "use fewer trainers or workers, or divide the data otherwise"
                raise SettingsError(f"{self.name}: stream({part}, {parts}) is empty; {rule}")
            alike = first.setdefault(begin[0], part)
            suspect = alike if alike < part else 0 if part == 1 and set(begin) & set(neighbour) else None
            if suspect is not None and _overlap(self._begin(suspect, parts), self._begin(part, parts)):
                twins = f"stream({suspect}, {parts}) and stream({part}, {parts}) give the same sequences"
                rule = "stream(index, count) must return the index-th of count disjoint parts"
                raise SettingsError(f"{self.name}: {twins}; {rule}")
            neighbour = begin

    def _begin(self, part: int, parts: int, count: int = NUM_IN_DOUBT) -> list[str]:
        """The digests of a part's first sequences, with seeds that differ between parts, as in training."""
        return [*islice(_digests(self.new(part, parts), part * NUM_IN_DOUBT), count)]

    def open(self, stream: Stream) -> "OwnReader":
        return OwnReader(self, stream)

    def collate(self, items: Sequence[Any]) -> ItemBatch:
        return ItemBatch(items, self.collate_items)

    def take_notes(self) -> list[str]:
        return []

    def new(self, index: int, count: int) -> Any:
        """A part's stream from its beginning; raises a SettingsError where it is no iterable with a state."""
        made = self.make(index, count)
        if missing := [method for method in METHODS if not hasattr(made, method)]:
            lacks = f"stream({index}, {count}) is a {type(made).__name__} without {', '.join(missing)}"
            raise SettingsError(f"{self.name}: {lacks}; see torchdata's StatefulDataLoader for the protocol")
        datasets = sys.modules.get("datasets")  # importing it takes seconds
        is_streaming_set = datasets is not None and isinstance(made, datasets.IterableDataset)
        return StreamingSet(made) if is_streaming_set else made


def _what_is_wrong(follower: str | None, before: list[str]) -> str:
    """What is wrong with a stream that gave `before`, then its state was loaded, then `follower` (None: nothing)."""
    gives = "gives another sequence than the one that followed"
    if follower is None:
        gives = "ends"
    elif follower in before:
        gives = "gives a sequence again that was read before: its state does not advance"
    where = "after load_state_dict" if len(before) == 1 else "when it is resumed a second time"
    rule = "state_dict must return the place after the last sequence, and load_state_dict continue there"
    return f"{gives} {where}, so that a resumed run would train on other data; {rule}"


def _overlap(first: list[str], second: list[str]) -> bool:
    """Whether one list begins as the other does, perhaps shifted by a few; equal sequences only prove nothing."""
    for shift in range(NUM_COMPARED):
        for ahead, behind in ((first[shift:], second), (second[shift:], first)):
            length = min(len(ahead), len(behind))
            if length >= MIN_OVERLAP and len(set(ahead[:length])) > 1 and ahead[:length] == behind[:length]:
                return True
    return False


def _digests(stream: Iterable[Any], number: int) -> Iterator[str]:
    """The digests of a stream's sequences, of which the first is the `number`-th. Random numbers are seeded before each
    of them, as in training, so that sequences which draw from torch's are equal where they should be."""
    items = iter(stream)
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            item = next(items, END)
        if item is END:
            return
        yield item_digest(item)
        number += 1


class OwnReader:
    """Reads one stream; iterates over it again where it ends."""

    def __init__(self, source: OwnStreams, stream: Stream) -> None:
        self._name = f"{source.name}: stream({stream.part}, {stream.parts})"
        self._new = partial(source.new, stream.part, stream.parts)
        self._open(stream.position)

    def _open(self, position: Mapping[str, Any] | None) -> None:
        self._iterable = self._new()
        self._is_resumed = self._may_be_at_end = position is not None
        if position is not None:
            self._iterable.load_state_dict(decode_state(position))
        self._iterator = iter(self._iterable)
        self._has_given = False

    def take(self) -> Any:
        while (item := next(self._iterator, END)) is END:
            self._begin_again()
        self._has_given = True
        return item

    def _begin_again(self) -> None:
        """Begin another pass.

        Many iterables into which a state was loaded begin every pass there. So the state at the end of a pass is loaded
        into a new one; if that gives no sequence in two passes either, another one begins without a state.
        """
        if self._has_given and self._is_resumed:
            self._open(self.position())
        elif self._has_given or self._may_be_at_end:
            self._has_given = self._may_be_at_end = False
            self._iterator = iter(self._iterable)
        elif self._is_resumed:
            self._open(None)
        else:
            rule = "it must begin again whenever it is iterated over"
            raise StreamError(f"{self._name} ends without a sequence; {rule}")

    def position(self) -> dict[str, Any]:
        try:
            return encode_state(self._iterable.state_dict())
        except ValueError as error:
            raise StreamError(f"{self._name}: state_dict() {error}") from error

    def close(self) -> None:
        """The iterable ends its threads or processes when it is garbage-collected."""


def encode_state(state: Any) -> dict[str, Any]:
    """A state as plain JSON values that contain what torch saves, because JSON would make lists of tuples; raises a
    ValueError where it holds something that torch would not load without pickle."""
    if foreign := _first_foreign(state):
        rule = "must hold nothing but numbers, strings, bytes, lists, tuples, dicts and tensors"
        raise ValueError(f"holds a {foreign}; it {rule}")
    file = io.BytesIO()
    torch.save(state, file)
    return {"torch": base64.b64encode(file.getvalue()).decode("ascii")}


def decode_state(position: Mapping[str, Any]) -> Any:
    """A copy of the state that `encode_state` was given."""
    return torch.load(io.BytesIO(base64.b64decode(position["torch"])), weights_only=True)


def _copied(state: Any) -> Any:
    """A state as a checkpoint would return it."""
    return decode_state(encode_state(state))


def _first_foreign(state: Any) -> str | None:
    """The type of an object that torch would not load with weights_only."""
    if type(state) in (dict, list, tuple):
        inner = [*state.keys(), *state.values()] if isinstance(state, dict) else state
        return next(filter(None, map(_first_foreign, inner)), None)
    is_plain = type(state) in (int, float, bool, str, bytes, type(None), torch.Tensor)
    return None if is_plain else type(state).__name__


class StreamingSet:
    """A `datasets.IterableDataset` with an exact state.

    Its own state is exact unless a buffer shuffles rows. Then the state is the number of rows that were read in this
    pass, and those are read again before the next one. Its own `__iter__` always begins at the state that was loaded;
    here, a pass that has ended is followed by one from the beginning.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._keeps_its_place = not _shuffles(getattr(dataset, "_ex_iterable", None))
        self._num_given = 0
        self._place: Any = None
        """The data set's own state; None: a row was read since it was loaded."""

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._dataset)
        for row in rows if self._keeps_its_place else islice(rows, self._num_given, None):
            self._num_given += 1
            self._place = None
            yield row
        self.load_state_dict({"rows": 0, "place": None})

    def state_dict(self) -> dict[str, Any]:
        place = self._place
        if place is None and self._keeps_its_place and self._num_given:
            place = self._dataset.state_dict()
        return {"rows": self._num_given, "place": place}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._num_given, self._place = state_dict["rows"], state_dict["place"]
        self._dataset.load_state_dict(self._place)


def _shuffles(source: Any) -> bool:
    """Whether a source of rows, or one from which it reads, shuffles rows in memory; an unknown one does."""
    if source is None:
        return True
    inner = [*getattr(source, "ex_iterables", ()), *filter(None, [getattr(source, "ex_iterable", None)])]
    return type(source).__name__ == BUFFER or any(map(_shuffles, inner))
