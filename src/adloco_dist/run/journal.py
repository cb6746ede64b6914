"""What rank 0 writes down and shows: the sinks of a run's records."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from adloco_dist.messages import Json, encode, strict_json
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.run.manifest import write_content
from adloco_dist.run.reading import PLANS_FILE, RUN_FILE
from adloco_dist.run.rows import METRICS_FILE, TrainerRow, encode_rows

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Something that takes a run's records: a file, a terminal, a tracker."""

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Take one round's records, one for each trainer."""

    def take_plan(self, plan: RoundPlan) -> None:
        """Take a plan, as soon as it is decided. By default it is not kept."""

    def close(self, result: Json | None) -> None:
        """End with the run's result, or with None if there is none."""

    def state(self) -> Json:
        """What it needs to continue after a restart, as plain JSON values; keys are its own. By default nothing."""
        return {}


class MetricsFile(Sink):
    """metrics.jsonl: one JSON object per round and trainer, written out at once."""

    def __init__(self, directory: Path, keep_bytes: int = 0) -> None:
        """Keep the whole lines of the first `keep_bytes`, which a run that resumes had written; a power cut or a full
        disk may have left half a line."""
        path = directory / METRICS_FILE
        self._lines = _Lines(path, whole_lines(path, keep_bytes))
        self.num_bytes = self._lines.num_bytes
        """Bytes that were in the file."""

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Append rows; without room for all it raises an OSError, and writes the rest before the next ones."""
        self._lines.append(encode_rows(rows))

    def close(self, result: Json | None) -> None:
        self._lines.close()

    def state(self) -> Json:
        return {"metrics_bytes": self._lines.num_bytes + len(self._lines.pending)}


class PlansFile(Sink):
    """plans.jsonl: every plan, as far as it is another than the one before, but for the costs that decide later
    ones; `read_plans` reads them."""

    def __init__(self, directory: Path, keep_rounds: int = 0) -> None:
        """Keep the plans of so many rounds, with which a run that resumes begins."""
        path = directory / PLANS_FILE
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        self._lines = _Lines(path, sum(len(line) + 1 for line in lines[:keep_rounds]))
        self._last: Json = {}

    def take_plan(self, plan: RoundPlan) -> None:
        content = encode(replace(plan, costs=()))
        changed = {key: value for key, value in content.items() if key not in self._last or self._last[key] != value}
        self._last = content
        self._lines.append(json.dumps(changed).encode() + b"\n")

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Records are none of its own."""

    def close(self, result: Json | None) -> None:
        self._lines.close()


class _Lines:
    """A file to which whole lines are appended, written out at once.

    Attributes:
        num_bytes: bytes that are in the file.
        pending: what there was no room for.
    """

    def __init__(self, path: Path, keep_bytes: int) -> None:
        self._file = path.open("r+b" if keep_bytes else "wb", buffering=0)
        self.num_bytes = self._file.truncate(keep_bytes)
        self._file.seek(self.num_bytes)
        self.pending = b""

    def append(self, lines: bytes) -> None:
        """Without room for all an OSError is raised, and the rest is written before the next ones."""
        self.pending += lines
        while self.pending:
            num_written = self._file.write(self.pending)
            self.pending = self.pending[num_written:]
            self.num_bytes += num_written

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path, keep_bytes: int) -> int:
    """Bytes of a file up to the end of the last line that is whole, within the first `keep_bytes`; 0 without one."""
    content = path.read_bytes() if path.exists() else b""
    return content.rfind(b"\n", 0, keep_bytes) + 1


class RunFile(Sink):
    """run.json: what ran and where (known at the start), who merged with whom, and the result (known at the end)."""

    def __init__(self, directory: Path, facts: Json, earlier: Json | None = None) -> None:
        """Write the file with `facts`; a run that resumes adds to the state that it has from `earlier` starts."""
        self._path = directory / RUN_FILE
        none = {"merges": [], "totals": {"rounds": 0, "tokens": 0, "bytes_sent": 0}, "seconds": 0.0}
        earlier = none | (earlier or {})
        self._facts = {**facts, "merges": list(earlier["merges"])}
        self._totals = dict(earlier["totals"])
        self._start = time.monotonic() - earlier["seconds"]
        self._save()

    def write(self, rows: Sequence[TrainerRow]) -> None:
        """Add up what rounds cost, and keep the merge tree: every merge, as soon as its first round is over."""
        self._totals["rounds"] = rows[0].round
        self._totals["tokens"] = rows[0].pool_tokens or 0
        self._totals["bytes_sent"] += sum(sum(row.bytes_sent.values()) for row in rows)
        merged = [
            {"before_round": row.round, "ranks": row.ranks, "workers": row.workers, **encode(row.merge)}
            for row in rows
            if row.merge
        ]
        if merged:
            self._facts["merges"] += merged
            self._save()

    def close(self, result: Json | None) -> None:
        totals = {**self._totals, "seconds": round(time.monotonic() - self._start, 3)}
        self._save({**result, **totals} if result else None)

    def state(self) -> Json:
        kept = {key: self._facts[key] for key in ("merges", "started", "resumed") if key in self._facts}
        hosts = self._facts.get("cluster", {}).get("hosts", [])
        return {**kept, "hosts": hosts, "totals": dict(self._totals), "seconds": time.monotonic() - self._start}

    def _save(self, result: Json | None = None) -> None:
        content = strict_json({**self._facts, "result": result})
        write_content(self._path, (json.dumps(content, indent=2) + "\n").encode())


class Journal:
    """Hands records to all sinks, in order, and closes them from the last to the first; ranks other than 0 have none.

    A full disk does not end a run: sinks keep what they could not write. A round is written once, also where ranks that
    have lost others report it again.
    """

    _is_closed = False

    def __init__(
        self, sinks: Sequence[Sink] = (), report_line: Callable[[str], None] = log.warning, last_round: int = -1
    ) -> None:
        """`last_round` is the last of which records are there."""
        self._sinks, self.report_line, self._last_round = sinks, report_line, last_round

    def take_plan(self, plan: RoundPlan) -> None:
        for sink in self._sinks:
            with self._reported(plan.round + 1):
                sink.take_plan(plan)

    def write(self, rows: Sequence[TrainerRow]) -> None:
        if rows[0].round <= self._last_round:
            return
        self._last_round = rows[0].round
        for sink in self._sinks:
            with self._reported(rows[0].round):
                sink.write(rows)

    def close(self, result: Json | None = None) -> None:
        """Close all sinks, once."""
        sinks, self._is_closed = () if self._is_closed else self._sinks, True
        for sink in reversed(sinks):
            sink.close(result)

    def state(self) -> Json:
        """What all sinks together need to continue after a restart."""
        return {key: value for sink in self._sinks for key, value in sink.state().items()}

    @contextmanager
    def _reported(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.report_line(f"round {number}: records are not written: {error}")
