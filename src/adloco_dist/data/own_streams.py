"""A user's own streams: iterables with a state, which continue from it on any rank.

The streaming sets of Hugging Face's `datasets` are among them, and lose their place by themselves.
"""

import base64
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from adloco_dist.config import SettingsError
from adloco_dist.data.items import Collate, ItemBatch
from adloco_dist.data.stream_checks import check_parts
from adloco_dist.data.streams import Stream, StreamError


class StatefulIterable(Protocol):
    """Sequences with a state between any two of them, as torchdata's StatefulDataLoader has it."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any:
        """The state after the sequences that were given so far."""
        ...

    def load_state_dict(self, state_dict: Any) -> None: ...


MakeStream = Callable[[int, int], Any]
"""Called with (index, count): a new `StatefulIterable` over the `index`-th of `count` disjoint parts of the data."""
METHODS = ("__iter__", "state_dict", "load_state_dict")
END = object()
BUFFER = "BufferShuffledExamplesIterable"
"""The class of `datasets` that shuffles rows in memory; its state does not hold the rows that wait there."""


@dataclass(frozen=True)
class OwnStreams:
    """A `StreamSource` of a user's streams. They are read in the thread that needs a batch: a user's code may draw from
    torch's random numbers, which every update seeds again, and has its own way of reading ahead."""

    name: str
    """The user's function, for errors."""
    make: MakeStream
    collate_items: Collate

    def check_parts(self, parts: int) -> None:
        check_parts(self.name, lambda part: self.new(part, parts), parts)

    def open(self, stream: Stream) -> "OwnReader":
        return OwnReader(self, stream)

    def collate(self, items: Sequence[Any]) -> ItemBatch:
        return ItemBatch(items, self.collate_items)

    def take_notes(self) -> list[str]:
        return []

    def new(self, index: int, count: int) -> StatefulIterable:
        """A part's stream from its beginning; raises a SettingsError where it is no iterable with a state."""
        made = self.make(index, count)
        if missing := [method for method in METHODS if not hasattr(made, method)]:
            lacks = f"stream({index}, {count}) is a {type(made).__name__} without {', '.join(missing)}"
            raise SettingsError(f"{self.name}: {lacks}; see torchdata's StatefulDataLoader for the protocol")
        return StreamingSet(made) if is_streaming_set(made) else made


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

        Many iterables that a state was loaded into begin every pass there. So the state at the end of a pass is loaded
        into a new one; where that gives no sequence even if it is iterated over twice, another begins without a state.
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
        """The iterable ends what it has started when it is collected."""


def encode_state(state: Any) -> dict[str, Any]:
    """A state as plain JSON values, which hold what torch saves: JSON alone would make lists of tuples; raises a
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


def _first_foreign(state: Any) -> str | None:
    """The type of an object that torch would not load with weights_only."""
    if type(state) in (dict, list, tuple):
        inner = [*state.keys(), *state.values()] if isinstance(state, dict) else state
        return next(filter(None, map(_first_foreign, inner)), None)
    is_plain = type(state) in (int, float, bool, str, bytes, type(None), torch.Tensor)
    return None if is_plain else type(state).__name__


class StreamingSet:
    """A `datasets.IterableDataset` with an exact state.

    Its own state is exact unless rows wait in a shuffling buffer. Then the state is the number of rows that were given
    in this pass, and those are read again before the next one. Its `__iter__` begins again at the state that was
    loaded, however often it is called; here, a pass that has ended is followed by one from the beginning.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._keeps_its_place = not _shuffles(getattr(dataset, "_ex_iterable", None))
        self._num_given = 0
        self._place: Any = None
        """The data set's own state, where no row was given since it was loaded."""

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


def is_streaming_set(made: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`, without importing `datasets`, which takes seconds."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(made, datasets.IterableDataset)


def _shuffles(source: Any) -> bool:
    """Whether a source of rows, or one that it reads from, shuffles rows in memory; of an unknown one: yes."""
    if source is None:
        return True
    inner = [*getattr(source, "ex_iterables", ()), *filter(None, [getattr(source, "ex_iterable", None)])]
    return type(source).__name__ == BUFFER or any(map(_shuffles, inner))
