"""What rank 0 writes down and shows: the sinks of a run's records."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from adloco_dist.run.directory import METRICS_FILE, RUN_FILE
from adloco_dist.run.rows import Record

log = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 16


class Sink(Protocol):
    """Something that takes a run's records: a file, a terminal, the process of a tracker."""

    def write(self, records: Sequence[Record]) -> None:
        """Take one round's records, one for each trainer."""

    def close(self, result: Record | None) -> None:
        """End with the run's result, or with None if there is none."""

    def state(self) -> Record:
        """What it needs to continue after a restart, as plain JSON values; keys are its own."""
        ...


class MetricsFile:
    """metrics.jsonl: one JSON object per round and trainer, written out at once."""

    def __init__(self, directory: Path, keep_bytes: int = 0) -> None:
        """
        Args:
            keep_bytes: what a run that resumes had written by then; the rest is cut off, and half a line that a power
                cut or a full disk may have left at its end.
        """
        path = directory / METRICS_FILE
        self._file = path.open("r+b" if keep_bytes and path.exists() else "wb", buffering=0)
        self.num_bytes = self._file.truncate(whole_lines(path, keep_bytes))
        """Bytes that are in the file."""
        self._file.seek(self.num_bytes)
        self._pending = b""

    def write(self, records: Sequence[Record]) -> None:
        """
        Raises:
            OSError: there is no room for all; the rest is kept, and written before the next ones.
        """
        self._pending += b"".join(json.dumps(strict_json(record)).encode() + b"\n" for record in records)
        while self._pending:
            num_written = self._file.write(self._pending)
            self._pending = self._pending[num_written:]
            self.num_bytes += num_written

    def close(self, result: Record | None) -> None:
        self._file.close()

    def state(self) -> Record:
        return {"metrics_bytes": self.num_bytes + len(self._pending)}


def whole_lines(path: Path, keep_bytes: int | None = None) -> int:
    """Bytes of a file up to the end of the last line that is whole, within the first `keep_bytes`; 0 without one."""
    try:
        with path.open("rb") as file:
            end = min(file.seek(0, os.SEEK_END), sys.maxsize if keep_bytes is None else keep_bytes)
            while end:
                start = max(0, end - BLOCK_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
    except FileNotFoundError:
        pass
    return 0


class RunFile:
    """run.json: what ran and where (known at the start), who merged with whom, and the result (known at the end)."""

    def __init__(self, directory: Path, facts: Record, earlier: Record | None = None) -> None:
        """
        Args:
            earlier: the state of a run that resumes.
        """
        self._path = directory / RUN_FILE
        none = {"merges": [], "totals": {"rounds": 0, "tokens": 0, "bytes_sent": 0}, "seconds": 0.0}
        earlier = {**none, **(earlier or {})}
        self._facts = {**facts, "merges": list(earlier["merges"])}
        self._totals = dict(earlier["totals"])
        self._start = time.monotonic() - earlier["seconds"]
        self._save({**self._facts, "result": None})

    def write(self, records: Sequence[Record]) -> None:
        """Add up what rounds cost, and keep the merge tree: every merge, as soon as its first round is over."""
        self._totals["rounds"] = records[0]["round"]
        self._totals["tokens"] = records[0].get("pool_tokens", 0)
        self._totals["bytes_sent"] += sum(sum(record["bytes_sent"].values()) for record in records)
        merged = [
            {"before_round": record["round"], "ranks": record["ranks"], "workers": record["workers"], **record["merge"]}
            for record in records
            if "merge" in record
        ]
        if merged:
            self._facts["merges"] += merged
            self._save({**self._facts, "result": None})

    def close(self, result: Record | None) -> None:
        totals = {**self._totals, "seconds": round(time.monotonic() - self._start, 3)}
        self._save({**self._facts, "result": {**result, **totals} if result else None})

    def state(self) -> Record:
        seconds = time.monotonic() - self._start
        kept = {key: self._facts[key] for key in ("merges", "started", "resumed") if key in self._facts}
        kept["hosts"] = self._facts.get("cluster", {}).get("hosts", [])
        return {**kept, "totals": dict(self._totals), "seconds": seconds}

    def _save(self, content: Record) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(strict_json(content), indent=2) + "\n", encoding="utf-8")
        temporary.replace(self._path)


class Journal:
    """Hands records to all sinks, in order, and closes them from the last to the first.

    One without sinks, on ranks other than 0, hands them to nobody. A full disk does not end a run: sinks keep what they
    could not write.
    """

    def __init__(self, sinks: Sequence[Sink] = (), report_line: Callable[[str], None] = log.warning) -> None:
        """
        Args:
            report_line: takes one line for the user.
        """
        self._sinks, self._report_line = sinks, report_line

    def write(self, records: Sequence[Record]) -> None:
        for sink in self._sinks:
            try:
                sink.write(records)
            except OSError as error:
                self._report_line(f"round {records[0]['round']}: records are not written: {error}")

    def close(self, result: Record | None = None) -> None:
        for sink in reversed(self._sinks):
            sink.close(result)

    def state(self) -> Record:
        """What all sinks together need to continue after a restart."""
        return {key: value for sink in self._sinks for key, value in sink.state().items()}


def strict_json(value: Any) -> Any:
    """`value` with null for numbers that JSON does not know (NaN, infinities)."""
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
