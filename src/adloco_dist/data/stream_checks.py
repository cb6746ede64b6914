"""Whether a user's streams are what they say, found out from a few sequences before training.

Sequences are compared by their digests. Torch's random numbers are seeded before each of them, as they are in training;
so sequences that draw from it are equal where they should be.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from adloco_dist.config import SettingsError
from adloco_dist.data.items import item_digest
from adloco_dist.text import reason

NUM_COMPARED, NUM_IN_DOUBT = 4, 32
"""Sequences that are read of two parts to compare them, and those that are where these look as if they overlapped."""
MIN_OVERLAP = 3
"""Sequences in a row that two parts have in common before they count as overlapping."""

New = Callable[[], Any]
"""Makes a stream: an iterable with `state_dict` and `load_state_dict`."""


def check_states(name: str, new: New, copy: Callable[[Any], Any]) -> str | None:
    """Check that a stream continues from its state; what a user should know of it, or None; raises a SettingsError
    where another sequence comes after a state that was loaded than came after it was taken, or a stream cannot be
    resumed at all.

    Of two streams three sequences are read, and one of each of two others.

    Args:
        name: what errors begin with.
        new: makes the stream from its beginning.
        copy: makes of a state what a checkpoint would return.
    """
    whole = new()
    sequences = _digests(whole, 0)
    expected = [*islice(sequences, 1)]
    state = copy(whole.state_dict())
    expected += islice(sequences, 2)
    other = new()
    if other is whole:
        rule = "it must make a new one whenever it is called, for several are read side by side"
        raise SettingsError(f"{name} is the same object at every call; {rule}")
    if [*islice(_digests(other, 0), len(expected))] != expected:
        return (
            f"{name} begins with other sequences whenever it is made: a resumed run does not repeat "
            "what was read, and parts may overlap; seed whatever it draws or shuffles with"
        )
    for number, sequence in enumerate(expected[1:], 1):  # the second time from the state of what was resumed
        try:
            resumed = new()
            resumed.load_state_dict(state)
            follower = next(_digests(resumed, number), None)
            state = copy(resumed.state_dict())
        except Exception as error:  # of whatever kind a user's code raises
            rule = "load_state_dict must take what state_dict returned, on any rank"
            raise SettingsError(f"{name} cannot be resumed ({reason(error)}); {rule}") from error
        if follower != sequence:
            raise SettingsError(f"{name} {_what_is_wrong(follower, expected[:number])}")
    return None


def _what_is_wrong(follower: str | None, before: list[str]) -> str:
    """What is wrong with a stream that gave `before`, and `follower` (None: nothing) after its state was loaded."""
    gives = "gives another sequence than the one that followed"
    if follower is None:
        gives = "ends"
    elif follower in before:
        gives = "gives a sequence again that was read before: its state does not advance"
    where = "after load_state_dict" if len(before) == 1 else "when it is resumed a second time"
    rule = "state_dict must return the place after the last sequence, and load_state_dict continue there"
    return f"{gives} {where}, so that a resumed run would train on other data; {rule}"


def check_parts(name: str, new: Callable[[int], Any], parts: int) -> None:
    """Check that each part has a sequence of its own, by the first few of them; raises a SettingsError where a part is
    empty, or reads what another one reads."""
    first: dict[str, int] = {}
    neighbour: list[str] = []
    for part in range(parts):
        # A part that draws random sequences draws others than the parts beside it, as in training.
        begin = _begin(new(part), part, NUM_COMPARED if part < 2 else 1)
        if not begin:
            rule = "use fewer trainers or workers, or divide the data otherwise"
            raise SettingsError(f"{name}: stream({part}, {parts}) is empty; {rule}")
        alike = first.setdefault(begin[0], part)
        suspect = alike if alike < part else 0 if part == 1 and set(begin) & set(neighbour) else None
        if suspect is not None and _overlap(_begin(new(suspect), suspect), _begin(new(part), part)):
            twins = f"stream({suspect}, {parts}) and stream({part}, {parts}) give the same sequences"
            rule = "stream(index, count) must return the index-th of count disjoint parts"
            raise SettingsError(f"{name}: {twins}; {rule}")
        neighbour = begin


def _begin(stream: Iterable[Any], part: int, count: int = NUM_IN_DOUBT) -> list[str]:
    return [*islice(_digests(stream, part * NUM_IN_DOUBT), count)]


def _overlap(first: list[str], second: list[str]) -> bool:
    """Whether two lists are equal as far as they go, perhaps shifted by a few; equal sequences alone say nothing."""
    for shift in range(NUM_COMPARED):
        for ahead, behind in ((first[shift:], second), (second[shift:], first)):
            length = min(len(ahead), len(behind))
            if length >= MIN_OVERLAP and len(set(ahead[:length])) > 1 and ahead[:length] == behind[:length]:
                return True
    return False


def _digests(stream: Iterable[Any], number: int) -> Iterator[str]:
    """The digests of a stream's sequences, of which the first is the `number`-th."""
    items, end = iter(stream), object()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            item = next(items, end)
        if item is end:
            return
        yield item_digest(item)
        number += 1
