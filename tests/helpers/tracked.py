"""What trackers have written, read back with their own classes."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

FILE_HEADER_BYTES, BLOCK_BYTES = 7, 32768
PART = struct.Struct("<IHB")
"""Checksum, length and kind of a part of a record."""
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, a log in the format of LevelDB (wandb has a reader in Go alone)."""
    content, place, record = path.read_bytes(), FILE_HEADER_BYTES, b""
    assert content[:4] == b":W&B"
    while place + PART.size <= len(content):
        if BLOCK_BYTES - place % BLOCK_BYTES < PART.size:  # the rest of a block is empty
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        _, length, kind = PART.unpack_from(content, place)
        place += PART.size
        record += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield Record.FromString(record)
            record = b""


@dataclass
class Logged:
    """A run of Weights & Biases, or the part of it that one start has logged."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """The values of every step."""
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    """What the curves of a name are drawn against."""
    exit_code: int | None = None

    @property
    def steps(self) -> list[int]:
        return [values["_step"] for values in self.history]


def value_of(item: Any) -> tuple[str, Any]:
    return item.key or "/".join(item.nested_key), json.loads(item.value_json)


def logged(directory: Path) -> list[Logged]:
    """What every start of a run has logged offline, in order."""
    return [_part(path) for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]


def _part(path: Path) -> Logged:
    part = Logged()
    for record in records(path):
        match record.WhichOneof("record_type"):
            case "run":
                part.run = record.run
                part.config |= dict(map(value_of, record.run.config.update))
            case "config":
                part.config |= dict(map(value_of, record.config.update))
            case "history":
                part.history.append(dict(map(value_of, record.history.item)))
            case "summary":
                part.summary |= dict(map(value_of, record.summary.update))
            case "metric":
                part.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "exit":
                part.exit_code = record.exit.exit_code
    return part


def curves(directory: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's curves of a run: value by step; a step that is there twice is an error."""
    accumulator = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for name in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(name)
        found[name] = {event.step: event.value for event in events}
        assert len(found[name]) == len(events), f"{name} has a step twice"
    return found
