"""When a checkpoint is written, which are kept, and whether a run may go on from one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco_dist.config import CheckpointSettings, SettingsError

NAME = re.compile(r"(\d{6,})-round-(\d+)")


@dataclass(frozen=True)
class Mark:
    """A point in a run: where it stood when a checkpoint was planned."""

    number: int = 0
    """Of the checkpoint, counted over all starts of the run; 0: none yet."""
    rounds: int = 0
    """That were complete."""
    tokens: int = 0
    """Of the whole pool."""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The directory of the checkpoint."""
        return f"{self.number:06d}-round-{self.rounds}"


def number_in(name: str) -> int | None:
    """The number of the checkpoint that a directory of this name holds; None: it is called like none."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_due(settings: CheckpointSettings, last: Mark, now: Mark) -> bool:
    """Whether one of the intervals has passed."""
    minutes = settings.every_minutes
    passed = (
        (settings.every_rounds, now.rounds - last.rounds),
        (settings.every_tokens, now.tokens - last.tokens),
        (None if minutes is None else 60 * minutes, now.seconds - last.seconds),
    )
    return any(interval is not None and distance >= interval for interval, distance in passed)


def obsolete(settings: CheckpointSettings, names: Sequence[str]) -> list[str]:
    """Those of the whole checkpoints that are kept no longer.

    Args:
        names: of their directories.
    """
    matches = sorted((int(match[1]), int(match[2]), name) for name in names if (match := NAME.fullmatch(name)))
    every = settings.keep_every_rounds
    return [
        name for _, rounds, name in matches[: -settings.keep_last] if every is None or rounds == 0 or rounds % every
    ]


FIXED = (
    "seed", "precision", "model.", "data.", "pool.trainers", "pool.workers_per_trainer", "algorithm.name",
    "inner.optimizer",
)  # fmt: skip
"""Settings (or sections) that make a checkpoint what it is: with others it would be another run, or no run at all."""
PLACES = {
    "data.train", "data.validation", "data.hub", "data.revision", "data.tokenizer", "model.warm_start", "model.revision"
}  # fmt: skip
"""Those of them that say where something lies. What lies there is compared itself, a corpus and its tokenizer by their
digest; the weights of a warm start are the checkpoint's by then."""
HOW = {"model.attention", "model.compile", "model.fuse_loss", "model.gradient_checkpointing"}
"""Those of them that say how it is computed: from then on figures differ in their last digits."""
FREE = ("run.", "tracking.", "checkpoint.")
"""Those that have no part in what is computed."""


def check_resumed(where: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that is to go on from it, both by dotted key.

    Returns:
        One remark for each setting from which on the run is another one.

    Raises:
        SettingsError: the run cannot go on with such a setting.
    """
    remarks = []
    for key, value in wanted.items():
        before = saved.get(key)
        if before == value or key.startswith(FREE):
            continue
        # A stream's digest has the names and sizes of its files alone.
        is_place = key in PLACES and not (key == "data.revision" and saved.get("data.streaming"))
        if is_place and value and before:
            remarks.append(f"goes on with {key}={value} instead of {before}; what lies there must be the same")
            continue
        has_moments = key in ("inner.momentum", "outer.momentum")
        if (key.startswith(FIXED) and key not in HOW) or (has_moments and bool(before) != bool(value)):
            rule = f"the run in {where} was trained with {key}={before}; set it to that, or name a new directory"
            raise SettingsError(f"{key}={value}: {rule}")
        remarks.append(f"goes on with {key}={value} instead of {before}")
    return remarks
