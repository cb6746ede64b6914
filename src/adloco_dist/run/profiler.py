"""Chosen rounds under torch's profiler: a trace of what this rank did in them, which Perfetto opens."""

import gzip
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig  # has no public name
from torch.profiler import ProfilerActivity, profile

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.text import reason

log = logging.getLogger(__name__)
GZIP_LEVEL = 1
"""A trace takes a tenth of its bytes then; the highest level takes a quarter less, and ten times as long."""


class RoundProfiler:
    """Profiles consecutive rounds on this rank into one file, with the phases that `record_function` names."""

    def __init__(
        self, rounds: range, folder: Path, runtime: Runtime, report_line: Callable[[str], None] = log.info
    ) -> None:
        """Profile these rounds, counted from 1; where there are none, it costs nothing, and no folder is made."""
        self._rounds, self._folder, self._runtime, self._report_line = rounds, folder, runtime, report_line
        self._profile: profile | None = None
        self._trained: list[int] = []
        self._profiled: list[int] = []

    def enter(self, number: int) -> None:
        """Begin round `number`; after the last chosen round, write the profile."""
        self._trained = [*self._trained[:1], number]
        if number not in self._rounds:
            self._write()
            return
        self._profiled.append(number)
        if self._profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # errors alone: it would report every start on the terminal
            gpu = [ProfilerActivity.CUDA] if self._runtime.device.type == "cuda" else []
            of_threads = _ExperimentalConfig(profile_all_threads=True)
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], experimental_config=of_threads)
            self._profile.start()

    def end(self) -> None:
        """End the last round of this start, whether it was the last of those to profile or not."""
        self._write()
        if self._rounds and not self._profiled:
            trained = f"rounds {self._trained[0]} to {self._trained[-1]}" if self._trained else "no round"
            chosen = f"profile.rounds={self._rounds[0]}:{self._rounds[-1]}"
            self._report_line(f"{chosen}: nothing was profiled, for this start trained {trained}")

    def _write(self) -> None:
        """Write what was profiled, if anything was; where that fails, training goes on without the file."""
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        first, last = self._profiled[0], self._profiled[-1]
        path = self._folder / f"rank{self._runtime.rank}-rounds{first}-{last}.json.gz"
        # torch holds the interpreter while it orders and writes events: seconds for a million of them.
        with self._runtime.heartbeat.silent(f"writing the profile of rounds {first} to {last}"):
            done.stop()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_trace(done, path)
            except OSError as error:
                self._report_line(f"rank {self._runtime.rank}: {path} is not written: {reason(error)}")
                return
        self._report_line(f"profile of rounds {first} to {last}, a file for every rank: {self._folder}")


def _write_trace(done: profile, path: Path) -> None:
    """Write a trace; raises an OSError, and leaves nothing, if there is no room for it or no such folder."""
    plain = path.with_suffix("")
    try:
        done.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise OSError("torch could not write the trace; there may be no room for it")
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=GZIP_LEVEL) as compressed:
            shutil.copyfileobj(source, compressed)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        for left in (plain, plain.with_name(f"{plain.name}.tmp")):  # torch writes the second, and renames it
            left.unlink(missing_ok=True)


def _is_whole(trace: Path) -> bool:
    """Whether all of a trace has been written; torch does not report it where there is no room."""
    try:
        with trace.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"}"
    except OSError:  # it is missing or empty
        return False
