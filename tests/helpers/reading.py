"""Rounds of reading, for tests of data sets of every kind."""

import json
from collections.abc import Mapping
from typing import Any

from adloco_dist.data.protocols import Batch, Cursor


def read_round(
    cursors: Mapping[int, Cursor], workers: Mapping[int, int], updates: int, local_batch: Mapping[int, int]
) -> dict[tuple[int, int], list[Batch]]:
    """What every worker of every trainer takes in a round, after which all cursors have advanced."""
    taken: dict[tuple[int, int], list[Batch]] = {}
    ends: dict[int, Any] = {}
    for trainer, cursor in cursors.items():
        count, size = workers[trainer], local_batch[trainer]
        for worker in range(count):
            taken[trainer, worker] = [cursor.batch(worker, count, update, size) for update in range(updates)]
        ends |= cursor.ends(range(count), count, updates * size)
    exchanged = {int(stream): end for stream, end in json.loads(json.dumps(ends)).items()}
    for trainer, cursor in cursors.items():
        cursor.advance(updates, workers[trainer], local_batch[trainer], exchanged)
    return taken


def states_of(cursors: Mapping[int, Cursor]) -> dict[int, dict[str, Any]]:
    """As a checkpoint keeps them."""
    return {trainer: json.loads(json.dumps(cursor.state_dict())) for trainer, cursor in cursors.items()}
