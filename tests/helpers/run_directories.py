"""Run directories made by hand, as runs write them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adloco_dist.config.compose import compose, to_plain
from adloco_dist.messages import Json, decode
from adloco_dist.run.rows import TrainerRow


def row(round_: int, trainer: int = 0, **fields: Any) -> Json:
    """A record of a round of ten seconds on one rank; None: without the field."""
    record = {
        "round": round_, "trainer": trainer, "elapsed_seconds": 10.0 * round_, "ranks": [trainer], "workers": 1,
        "updates": 4, "delay_updates": 0, "pool_tokens": 1000 * round_, "total_batch": 8, "local_batch": 8,
        "request": 6.0, "bounded_request": 8.0, "bound": "min_batch", "mode": "whole", "passes": 1, "notes": [],
        "train_loss": 4.0 - 0.01 * round_, "nonfinite_workers": [],
        "seconds": {"inner": 8.0, "outer": 2.0}, "utilisation": {str(trainer): 0.8}, "worth": 1.5,
        "rank_seconds": {str(trainer): {"inner": 8.0, "outer": 1.5, "wait": 0.5, "control": 0.5, "transfer": 3.0}},
        "bytes_sent": {"outer": 2_000_000, "control": 500}, "noise_scale": 5.0,
        "resources": {str(trainer): {"memory_bytes": 5e8, "cpu_percent": 90.0, "resent_packets": 7}},
    } | fields  # fmt: skip
    return {name: value for name, value in record.items() if value is not None}


def typed(records: Sequence[Json]) -> list[TrainerRow]:
    """The same as rows."""
    return [decode(TrainerRow, record) for record in records]


def before_training(*trainers: int) -> list[Json]:
    """The records of the state before training."""
    return [
        {"round": 0, "trainer": trainer, "elapsed_seconds": 0.0, "validation_loss": 5.0, "bytes_sent": {}}
        for trainer in trainers
    ]


def result(loss: float = 3.5) -> Json:
    """What a run came to."""
    candidate = {"name": "trainer 0", "validation_loss": loss}
    return {"stop": "budget=3rounds reached", "saved": "trainer 0", "candidates": [candidate]}


def run_directory(
    path: Path, rows: Sequence[Json], overrides: Sequence[str] = (), ends: Json | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a run directory, and return it.

    Args:
        ends: the result; None: the run has not ended.
        facts: further parts of run.json.
    """
    path.mkdir(parents=True)
    content = {
        "started": "2026-01-31T12:00:00+00:00", "versions": {"torch": "2.13.0"},
        "settings": to_plain(compose(overrides)),
        "cluster": {"world_size": 2, "nodes": [0, 0], "hosts": ["one", "one"], "ranks": [], "links": []},
        "corpus": {"source": "a text", "digest": "0"}, "merges": [], "result": ends, **(facts or {}),
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(content))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rows))
    return path
