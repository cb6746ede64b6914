"""A user's own data, from what a function of the user returns: items by number, or streams with a state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from adloco_dist.config.errors import SettingsError, refused
from adloco_dist.data.indexed import IndexedDataset
from adloco_dist.data.items import Collate, ItemBatch, item_digest, joined_digest
from adloco_dist.data.own_streams import METHODS, OwnStreams, encode_state
from adloco_dist.data.protocols import SequenceIds, Splits
from adloco_dist.data.streams import StreamDataset
from adloco_dist.text import reason

NEEDS_COLLATE = "give launch a collate=... that makes a batch of a list of items"


@dataclass(frozen=True)
class ItemTable:
    """A user's items as sequences by number."""

    items: Any
    """Has a length, and items by number from 0 on, as torch's map-style data sets do."""
    collate: Collate = default_collate
    _lock: Lock = field(default_factory=Lock)

    @property
    def num_sequences(self) -> int:
        return len(self.items)

    def batch(self, ids: SequenceIds) -> ItemBatch:
        with self._lock:  # workers of one rank may read at the same time, and a user's data set is not made for that
            return ItemBatch([self.items[int(number)] for number in ids], self.collate)


@dataclass(frozen=True, kw_only=True)
class OwnSplits(Splits):
    """A user's training and validation data."""

    first_batch: Callable[[int], ItemBatch]
    """Makes a batch of so many training sequences, from the first one on, to try a model with; where there are fewer,
    they are repeated."""


@torch.random.fork_rng(devices=[])
def own_splits(load: Callable[[], Any], collate: Collate = default_collate) -> OwnSplits:
    """A user's data for training and validation; raises a SettingsError where it is of another kind, or empty.

    Args:
        load: returns (train, validation). Training data has a length and items by number, or is a function
            stream(index, count) that returns an iterable with a state (`own_streams.MakeStream`). Validation data has
            a length and items. A `digest` attribute, a string, identifies the data; without one, its length and its
            first and last items do, which then must be the same on all ranks.
        collate: makes the argument of the loss from a list of items.
    """
    name, loaded = f"data={getattr(load, '__name__', type(load).__name__)}", load()
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        raise SettingsError(f"{name}: returned a {type(loaded).__name__}; return two data sets, (train, validation)")
    train, validation = loaded
    if missing := _missing_of_items(validation):
        lacks = f"validation is a {type(validation).__name__} without {', '.join(missing)}"
        raise SettingsError(f"{name}: {lacks}; give it a length and items by number")
    held_out = _digest_of_items(f"{name}: validation", validation, collate)
    table = ItemTable(validation, collate)
    if not _missing_of_items(train):
        digest = _digest_of_items(f"{name}: train", train, collate)
        source, items = f"{len(train):,} items of a {type(train).__name__}", ItemTable(train, collate)
        return OwnSplits(
            train=IndexedDataset(items, joined_digest(digest, held_out)),
            validation=table,
            source=source,
            first_batch=lambda count: items.batch(np.arange(count) % items.num_sequences),
        )
    if not callable(train):
        raise SettingsError(f"{name}: {_why_neither(train)}")
    streams = OwnStreams(name, train, collate)
    digest = joined_digest(_digest_of_stream(streams), held_out)
    note = streams.check_states()
    if note and not _own_digest(train):  # without one, the first sequence identifies the data
        raise SettingsError(note)
    return OwnSplits(
        train=StreamDataset(streams, digest),
        validation=table,
        source=f"streams of {getattr(train, '__name__', type(train).__name__)}",
        first_batch=lambda count: streams.collate(list(islice(cycle(islice(streams.new(0, 1), count)), count))),
        notes=(note,) if note else (),
    )


def _missing_of_items(data: Any) -> list[str]:
    """The methods of a data set of items by number that this one lacks."""
    is_stream = isinstance(data, torch.utils.data.IterableDataset)  # whose __getitem__ is not implemented
    has_items = hasattr(data, "__getitem__") and not is_stream
    return [*([] if hasattr(data, "__len__") else ["__len__"]), *([] if has_items else ["__getitem__"])]


def _why_neither(train: Any) -> str:
    """Why training data is neither items by number nor a function that makes streams."""
    kind, state = type(train).__name__, [method for method in METHODS if not hasattr(train, method)]
    if not state:
        rule = "return a function stream(index, count) that makes such an iterable for each worker"
        return f"train is one {kind} with a state, but every worker reads its own; {rule}"
    items = ", ".join(_missing_of_items(train))
    rule = "give it a length and items by number, or return a function stream(index, count) of iterables with a state"
    return f"train is a {kind} without {items}, and without {', '.join(state)}; {rule}"


def _digest_of_items(name: str, data: Any, collate: Collate) -> str:
    """Identifies the data by its first and last items; raises a SettingsError where it is empty, has no item under a
    number, or `collate` cannot join two items."""
    if not len(data):
        raise SettingsError(f"{name} is empty; return data with at least one item")
    ends = []
    torch.manual_seed(0)  # items that draw random numbers are equal on all ranks
    for number in (0, len(data) - 1):
        try:
            ends.append(data[number])
        except Exception as error:  # of whatever kind a user's code raises
            rule = f"items must have the numbers 0 to {len(data) - 1}"
            raise SettingsError(f"{name}[{number}] raises {reason(error)}; {rule}") from error
    with refused(f"{name}: items cannot be collated", NEEDS_COLLATE):
        collate(list(ends))
    return _own_digest(data) or item_digest([len(data), *ends])


def _digest_of_stream(streams: OwnStreams) -> str:
    """Identifies the data by its first sequence; raises a SettingsError where there is none, or the state after it
    cannot be kept."""
    name = f"{streams.name}: train"
    torch.manual_seed(0)  # sequences that draw random numbers are equal on all ranks
    whole = streams.new(0, 1)
    first = list(islice(whole, 1))
    if not first:
        raise SettingsError(f"{name}: stream(0, 1) is empty; return data with at least one sequence")
    try:
        encode_state(whole.state_dict())
    except ValueError as error:
        raise SettingsError(f"{name}: state_dict() of stream(0, 1) {error}") from error
    with refused(f"{name}: items cannot be collated", NEEDS_COLLATE):
        streams.collate_items(list(first))
    return _own_digest(streams.make) or item_digest(first)


def _own_digest(data: Any) -> str | None:
    digest = getattr(data, "digest", None)
    return digest if isinstance(digest, str) else None
