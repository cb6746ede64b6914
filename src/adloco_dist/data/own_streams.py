"""A user's own streams: iterables with a state, which continue from it on any rank."""

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from adloco_dist.config import SettingsError
from adloco_dist.data.item_batch import Collate, ItemBatch
from adloco_dist.data.stream_checks import check_parts
from adloco_dist.data.streaming_sets import StreamingSet, is_streaming_set
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


@dataclass(frozen=True)
class OwnStreams:
    """A `StreamSource` of a user's streams.

    They are read in the thread that needs a batch: a user's code may draw from torch's random numbers, which every
    update seeds again, and has its own way of reading ahead.
    """

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
        """A part's stream from its beginning.

        Raises:
            SettingsError: it is no iterable with a state.
        """
        made = self.make(index, count)
        if missing := [method for method in METHODS if not hasattr(made, method)]:
            detail = f"stream({index}, {count}) is a {type(made).__name__} without {', '.join(missing)}"
            raise SettingsError(f"{self.name}: {detail}; see torchdata's StatefulDataLoader for the protocol")
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
        while True:
            try:
                item = next(self._iterator)
            except StopIteration:
                self._begin_again()
            else:
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
            detail = "ends without a sequence; it must begin again whenever it is iterated over"
            raise StreamError(f"{self._name} {detail}")

    def position(self) -> dict[str, Any]:
        try:
            return encode_state(self._iterable.state_dict())
        except ValueError as error:
            raise StreamError(f"{self._name}: state_dict() {error}") from error

    def close(self) -> None:
        """The iterable ends what it has started when it is collected."""


def encode_state(state: Any) -> dict[str, Any]:
    """A state as plain JSON values: as it is, or, with tensors and tuples in it, as torch saves it.

    Raises:
        ValueError: it holds something else, which would not load without pickle.
    """
    try:
        text = json.dumps(state, allow_nan=False)
        if _is_same(json.loads(text), state):
            return {"json": json.loads(text)}  # a copy, which the iterable cannot change later
    except (TypeError, ValueError):
        pass
    if foreign := _first_foreign(state):
        rule = "must hold nothing but numbers, strings, bytes, lists, tuples, dicts and tensors"
        raise ValueError(f"holds a {foreign}; it {rule}")
    file = io.BytesIO()
    torch.save(state, file)
    return {"torch": base64.b64encode(file.getvalue()).decode("ascii")}


def decode_state(position: Mapping[str, Any]) -> Any:
    """The state that `encode_state` was given; a fresh copy."""
    if "json" in position:
        return json.loads(json.dumps(position["json"]))
    return torch.load(io.BytesIO(base64.b64decode(position["torch"])), weights_only=True)


def _is_same(decoded: Any, state: Any) -> bool:
    """Whether JSON has kept every type: it makes lists of tuples, and strings of keys that are numbers."""
    if type(decoded) is not type(state):
        return False
    if isinstance(state, dict):
        return decoded.keys() == state.keys() and all(_is_same(decoded[key], one) for key, one in state.items())
    if isinstance(state, list):
        return len(decoded) == len(state) and all(map(_is_same, decoded, state))
    return decoded == state


def _first_foreign(state: Any) -> str | None:
    """The type of an object that torch would not load with weights_only."""
    if type(state) in (dict, list, tuple):
        inner = [*state.keys(), *state.values()] if isinstance(state, dict) else state
        return next(filter(None, map(_first_foreign, inner)), None)
    is_plain = type(state) in (int, float, bool, str, bytes, type(None), torch.Tensor)
    return None if is_plain else type(state).__name__
