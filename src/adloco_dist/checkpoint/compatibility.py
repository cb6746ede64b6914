"""Whether a run may resume from a checkpoint with these settings."""

from collections.abc import Mapping
from typing import Any

from adloco_dist.config import SettingsError

FIXED = (
    "seed", "precision", "model.", "data.", "pool.trainers", "pool.workers_per_trainer", "algorithm.averages",
    "inner.optimizer", "wire.fragments",
)  # fmt: skip
"""Settings (or sections) that make a checkpoint what it is: with others it would be another run, or no run at all."""
PLACES = {
    "data.train", "data.validation", "data.hub", "data.revision", "data.tokenizer", "model.warm_start", "model.revision"
}  # fmt: skip
"""Fixed settings that say where something lies. What lies there is compared itself, a corpus and its tokenizer by their
digest; the weights of a warm start are the checkpoint's by then."""
HOW = {"model.attention", "model.compile", "model.fuse_loss", "model.gradient_checkpointing"}
"""Fixed settings that say how things are computed: with others, figures differ in their last digits from then on."""
FREE = ("run.", "tracking.", "profile.", "checkpoint.")
"""Settings (or sections) that have no part in what is computed."""


def check_resumed(where: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that is to resume from it, both by dotted key.

    Returns:
        One remark for each setting from which on the run is another one.

    Raises:
        SettingsError: the run cannot resume with such a setting.
    """
    remarks = []
    for key, value in wanted.items():
        before = saved.get(key)
        if before == value or key.startswith(FREE):
            continue
        # A stream's digest has the names and sizes of its files alone.
        is_place = key in PLACES and not (key == "data.revision" and saved.get("data.streaming"))
        if is_place and value and before:
            remarks.append(f"resumes with {key}={value} instead of {before}; what lies there must be the same")
            continue
        has_vector = key in ("inner.momentum", "outer.momentum", "outer.average_span")
        if (key.startswith(FIXED) and key not in HOW) or (has_vector and bool(before) != bool(value)):
            rule = f"the run in {where} was trained with {key}={before}; set it to that, or name a new directory"
            raise SettingsError(f"{key}={value}: {rule}")
        remarks.append(f"resumes with {key}={value} instead of {before}")
    return remarks
