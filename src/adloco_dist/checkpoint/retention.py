"""Which checkpoints are kept, by the names of their directories."""

import re
from collections.abc import Sequence

from adloco_dist.config import CheckpointSettings

NAME = re.compile(r"(\d{6,})-round-(\d+)")


def number_in(name: str) -> int | None:
    """The number of the checkpoint that a directory of this name holds; None: it is called like none."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def obsolete(settings: CheckpointSettings, names: Sequence[str]) -> list[str]:
    """Return the names of the whole checkpoints that are kept no longer.

    Args:
        names: names of the directories of all whole checkpoints.
    """
    matches = sorted((int(match[1]), int(match[2]), name) for name in names if (match := NAME.fullmatch(name)))
    every = settings.keep_every_rounds
    return [
        name for _, rounds, name in matches[: -settings.keep_last] if every is None or rounds == 0 or rounds % every
    ]
