"""When the fragments of a model are averaged: the same on all ranks, from counted updates alone."""

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What happens to a fragment of the model."""

    mix = "mix"
    """Its outer step, whose average travelled meanwhile, reaches the workers."""
    start = "start"
    """Its pseudo-gradients are averaged, or their average starts to travel."""
    end = "end"
    """The same, of the first fragment, and the round ends."""


@dataclass(frozen=True)
class Event:
    """What happens after so many updates of a round."""

    update: int
    action: Action
    fragment: int


def round_events(
    updates_per_round: int,
    fragments: int = 1,
    delay_updates: int = 0,
    updates: int | None = None,
    is_mixed: bool = False,
) -> tuple[Event, ...]:
    """The events of a round, in their order; a ValueError of one line where fragments or delay do not fit into it.

    The averages of the fragments are evenly spread; the first one's is the end of the round. An average that starts
    after an update reaches the workers `delay_updates` later: that of the first fragment in the next round. Two are
    never under way at once.

    Args:
        updates_per_round: H, over which the averages are spread.
        updates: after which the round ends; None: after H. In a last round that is shorter, fragments whose time does
            not come are not averaged.
        is_mixed: whether averages start and are mixed in without a delay, too; else they are taken at once.
    """
    if not 1 <= fragments <= updates_per_round:
        rule = f"must be from 1 to the {updates_per_round} updates of a round"
        raise ValueError(f"fragments={fragments}: {rule}")
    distance = updates_per_round // fragments
    if not 0 <= delay_updates < distance:
        rule = f"must be from 0 to below the {distance} updates between two averages"
        raise ValueError(f"delay_updates={delay_updates}: {rule}")
    last = updates_per_round if updates is None else updates
    times = [fragment * updates_per_round // fragments for fragment in range(fragments)]
    starts = [Event(time, Action.start, fragment) for fragment, time in enumerate(times) if fragment]
    is_mixed |= delay_updates > 0
    mixes = [Event(time + delay_updates, Action.mix, fragment) for fragment, time in enumerate(times) if is_mixed]
    # After the same update, what arrives is mixed before the next average starts, or right after its own start where
    # there is no delay; the end comes last.
    in_order = mixes + starts if delay_updates else starts + mixes
    within = sorted((event for event in in_order if event.update <= last), key=lambda event: event.update)
    return *within, Event(last, Action.end, 0)
