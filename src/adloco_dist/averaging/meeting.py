"""How ranks come to stand at one point: when they begin, and when others are gone or have come.

Whoever has come furthest is followed. What the ranks that follow have learned since is in the average that they have
missed, or they are new.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import NamedTuple

from adloco_dist.averaging.checks import RESTART, checksum
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.in_place import InPlace
from adloco_dist.averaging.outer_step import OuterStep
from adloco_dist.averaging.replica import R
from adloco_dist.schema import NOTHING
from adloco_dist.text import first_difference

log = logging.getLogger("adloco_dist.diloco")

TORN = -1
"""Steps of a rank whose last step an error has interrupted: nobody follows it."""
NO_ANCHOR = f"an outer step was interrupted on all ranks, so that none has a whole anchor; {RESTART}"


class Met(NamedTuple):
    """What ranks have found when they met; but for `brings`, the same on all."""

    round: int
    """Rounds that were completed."""
    brings: bool
    """Whether this rank's worker has learned something that is in no average."""
    any_brings: bool
    """Whether that of any rank has."""


def meet(
    group: Group | None,
    settings: Mapping[str, str],
    step: OuterStep[InPlace],
    round_number: int,
    has_learned: bool,
    has_returned: bool,
) -> Met:
    """Give all ranks the anchor, the outer momentum and the buffers of the lowest rank among those that have come
    furthest, of those that have not returned if there are such. Collective; no average may be under way.

    Args:
        group: None: this rank is alone.
        settings: as `settings_in_words` has them.
        round_number: rounds that this rank has completed.
        has_learned: whether its worker has other weights than the anchor.
        has_returned: whether it was apart, where it may have come further by itself.

    Raises:
        ValueError: ranks have different models or settings; on all of them the same line.
        RuntimeError: no rank has a whole anchor.
    """
    (replica,), is_torn = step.workers, step.is_torn
    if group is None and not is_torn:
        return Met(round_number, has_learned, has_learned)
    if group is None:
        raise RuntimeError(NO_ANCHOR)
    buffers = replica.buffers
    if group.index == 0 and (names := replica.parameters.without_optimizer):
        log.warning("%d parameters that require gradients are in no optimizer: %s, ...", len(names), names[0])
    part = {"averaged part of the model": step.division.shards.place}
    _compare(group, {**settings, **part, **replica.parameters.facts(), **buffers.facts()})
    changing = [TORN] if buffers.changing is None else [int(name in buffers.changing) for name in buffers.values]
    state = [tensor for tensor in (step.anchor, step.momentum) if tensor is not None]
    sums = [number for tensor in (*state, *buffers.values.values()) for number in checksum(tensor)]
    padding = [0] * (1 + len(buffers.values) - len(changing))
    stand = [TORN if is_torn else step.steps, has_returned, round_number, has_learned]
    rows = group.exchange([*stand, *changing, *padding, *sums])
    first = max(range(len(rows)), key=lambda place: (rows[place][0] != TORN, -rows[place][1], rows[place][0], -place))
    followed, own = rows[first], rows[group.index]
    if followed[0] == TORN:
        raise RuntimeError(NO_ANCHOR)
    stands = [(row[0], row[4:]) == (followed[0], followed[4:]) for row in rows]
    if not all(stands):
        step.is_torn = is_torn or not stands[group.index]  # until all of it has come
        for tensor in state:
            group.broadcast(tensor, group.ranks[first])
        buffers.broadcast(group, step.anchor.device, group.ranks[first])
    if stands[group.index]:
        brings = has_learned
    else:
        if followed[4] != TORN:
            buffers.changing = [name for name, changes in zip(buffers.values, followed[4:], strict=False) if changes]
        if step.residual is not None:  # it was sent, or belongs to another anchor
            step.residual.zero_()
        brings = own[0] == followed[0] - 1 and catch_up(step)
        if not brings:
            replica.adopt(step.anchor)
        step.steps, step.is_torn = followed[0], False
    return Met(followed[2], brings, any(any_brings for (any_brings,) in group.exchange([brings])))


def catch_up(step: OuterStep[R]) -> bool:
    """Take over the step of an average that has failed here and was completed elsewhere, as the anchor has it; whether
    workers have learned more than was in that average."""
    index, step.unfinished = step.unfinished, NOTHING
    if index == NOTHING:
        return False
    if any(replica.has_given_up(index) for replica in step.workers):
        for replica in step.workers:
            replica.await_again()
        step.mix(index)
        return True
    for replica in step.workers:
        for run in replica.runs(step.fragments[index]):
            replica.restart(step.anchor[run.where], run)
    return len(step.fragments) > 1


def _compare(group: Group, facts: Mapping[str, str]) -> None:
    """Raise a ValueError, on all ranks with the same line, where they have different models or settings. Collective."""
    text = json.dumps(facts, sort_keys=True)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
    if len({tuple(row) for row in group.exchange([digest])}) > 1:  # only then do the facts themselves travel
        difference = first_difference([json.loads(facts) for facts in group.exchange_text(text)], group.ranks)
        raise ValueError(f"{difference}; start all ranks with the same model and settings")
