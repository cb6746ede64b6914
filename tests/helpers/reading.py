"""Rounds of reading, for tests of data sets of every kind."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adloco_dist.data.protocols import Batch, Cursor


def read_round(
    cursors: Mapping[int, Cursor],
    workers: Mapping[int, int],
    updates: int,
    local_batch: Mapping[int, int],
    unequal: Mapping[int, Sequence[int]] | None = None,
) -> dict[tuple[int, int], list[Batch]]:
    """What every worker of every trainer takes in a round, after which all cursors have advanced; `unequal` has the
    updates of each worker of those trainers in which they differ."""

    def counts(trainer: int) -> Sequence[int]:
        return (unequal or {}).get(trainer, [updates] * workers[trainer])

    taken: dict[tuple[int, int], list[Batch]] = {}
    ends: dict[int, Any] = {}
    for trainer, cursor in cursors.items():
        taken_by, size = counts(trainer), local_batch[trainer]
        for worker, taken_here in enumerate(taken_by):
            taken[trainer, worker] = [cursor.batch(worker, update, size, taken_by) for update in range(taken_here)]
        ends |= cursor.ends(range(len(taken_by)), size, taken_by)
    exchanged = {int(stream): end for stream, end in json.loads(json.dumps(ends)).items()}
    for trainer, cursor in cursors.items():
        cursor.advance(local_batch[trainer], counts(trainer), exchanged)
    return taken


def states_of(cursors: Mapping[int, Cursor]) -> dict[int, dict[str, Any]]:
    """As a checkpoint keeps them."""
    return {trainer: json.loads(json.dumps(cursor.state_dict())) for trainer, cursor in cursors.items()}
