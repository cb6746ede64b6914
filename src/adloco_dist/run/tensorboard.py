"""TensorBoard as a tracker."""

import time
from collections.abc import Mapping
from pathlib import Path

# Classes of protobuf are made when they are imported, where pyright does not see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from adloco_dist.run.rows import Record
from adloco_dist.run.tracking import TENSORBOARD

FLUSH_SECONDS = 5
"""Rounds are on disk after so long, where TensorBoard finds them."""


class TensorBoardTracker:
    """Writes the numbers of every round as scalars; the step is the round."""

    def __init__(self, directory: Path, next_round: int) -> None:
        """
        Args:
            next_round: the first round that will be written; what earlier starts have written from there on is purged.
        """
        self._writer = EventFileWriter(str(directory / TENSORBOARD), flush_secs=FLUSH_SECONDS)
        self._add(Event(step=next_round, session_log=SessionLog(status=SessionLog.START)))

    def write(self, round_number: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if name != "round"]
        self._add(Event(step=round_number, summary=Summary(value=scalars)))

    def close(self, result: Record | None) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
