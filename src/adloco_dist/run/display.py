"""What the user sees: a live table and a bar on a terminal, one line per round elsewhere; the log has the lines too."""

import logging
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from adloco_dist.config import BudgetSettings
from adloco_dist.policy.evaluation import in_words
from adloco_dist.run.rows import Record, merge_in_words, nonfinite_in_words
from adloco_dist.text import one_line

log = logging.getLogger(__name__)

TITLES = ("trainer", "ranks", "workers", "batch", "passes", "noise scale", "tokens/s", "train loss", "validation")

DOES_NOT_PAY = (
    "averaging does not pay on this link: one worker alone would make more progress per second (worth in metrics.jsonl)"
    "; algorithm.round=link, wire=slow_link or larger batches may change that"
)
UNPAID_ROUNDS = 5
"""Rounds in a row after which that is said."""
LINES = 200
"""Lines that tell of a whole run's rounds where there is no terminal, about: rounds may be short and many."""


class Display:
    """A sink for people."""

    def __init__(self, console: Console, budget: BudgetSettings, earlier_seconds: float = 0.0) -> None:
        self._console = console
        (self._unit, limit), *_ = ((unit, limit) for unit, limit in vars(budget).items() if limit is not None)
        self._start = time.monotonic() - earlier_seconds
        self._limit, self._shown_share = float(limit), -1.0
        self._latest: dict[int, Record] = {}
        self._reported: set[tuple[int, str]] = set()
        self._unpaid_rounds: dict[int, int] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} % of {task.fields[budget]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task = self._progress.add_task("training", total=float(limit), budget=f"{limit:,} {self._unit}")
        self._live = Live(self._render(), console=console, refresh_per_second=4, transient=False)
        if console.is_terminal:
            self._live.start()

    def write(self, records: Sequence[Record]) -> None:
        self._report_notes(records)
        for record in records:
            if "merge" in record:
                self._say(merge_in_words(record))
            if record.get("nonfinite_workers"):
                self._say(nonfinite_in_words(record))
        shown, self._latest = self._latest, {}  # without the trainers that have ended
        for record in records:
            # An evaluation stays on show until the next one.
            kept = {key: value for key, value in shown.get(record["trainer"], {}).items() if "validation" in key}
            self._latest[record["trainer"]] = {**kept, **record}
        done = {
            "rounds": records[0]["round"],
            "tokens": records[0].get("pool_tokens", 0),
            "seconds": time.monotonic() - self._start,
        }
        share = done[self._unit] / self._limit
        is_new = share - self._shown_share >= 1 / LINES or any("validation_loss" in record for record in records)
        self._progress.update(self._task, completed=done[self._unit], description=f"round {records[0]['round']}")
        if self._console.is_terminal:
            self._live.update(self._render())
        elif is_new and (line := _line(records)):
            self._shown_share = share
            self._say(line)

    def close(self, result: Record | None) -> None:
        if self._console.is_terminal:
            self._live.stop()
        if result is not None and result["candidates"]:
            self._console.print(_result_table(result))

    def state(self) -> Record:
        return {}

    def report_line(self, line: str) -> None:
        """Show a line that belongs to no record; from any thread."""
        self._say(f"note: {line}")

    def _say(self, line: str) -> None:
        log.info("%s", line)
        self._console.print(one_line(line), soft_wrap=True)

    def _report_notes(self, records: Sequence[Record]) -> None:
        """Print every note once; the records hold it for each round that it is about."""
        notes = {(record["trainer"], note) for record in records for note in record.get("notes", [])}
        notes |= {(trainer, DOES_NOT_PAY) for trainer in self._unpaid(records)}
        for trainer, note in sorted(notes - self._reported):
            self._say(f"round {records[0]['round']}, trainer {trainer}: {note}")
        self._reported |= notes

    def _unpaid(self, records: Sequence[Record]) -> list[int]:
        """The trainers for which one worker alone would have done better in some rounds in a row."""
        for record in records:
            worth, trainer = record.get("worth"), record["trainer"]
            self._unpaid_rounds[trainer] = self._unpaid_rounds.get(trainer, 0) + 1 if worth and worth < 1 else 0
        return [trainer for trainer, rounds in self._unpaid_rounds.items() if rounds >= UNPAID_ROUNDS]

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in TITLES:
            table.add_column(title, justify="right")
        for _, record in sorted(self._latest.items()):
            seconds = sum(record["seconds"].values())
            table.add_row(
                str(record["trainer"]),
                ",".join(map(str, record["ranks"])),
                str(record["workers"]),
                _shown(record, "total_batch", ","),
                _shown(record, "passes", ","),
                _shown(record, "noise_scale", ",.1f"),
                f"{record['tokens'] / seconds:,.0f}" if "tokens" in record else "",
                _shown(record, "train_loss", ".3f"),
                in_words(record) if "validation_loss" in record else "",
            )
        return Group(table, self._progress)


def _shown(record: Record, key: str, spec: str) -> str:
    """The value, or nothing where the record has none."""
    value = record.get(key)
    return "" if value is None else format(value, spec)


def _line(records: Sequence[Record]) -> str:
    """What there is to show of a round; empty before training where nothing was evaluated."""
    parts = []
    for record in records:
        detail = []
        if "train_loss" in record:
            passes = f" in {record['passes']} passes" if record["passes"] > 1 else ""
            detail.append(f"batch {record['total_batch']}{passes} loss {record['train_loss']:.3f}")
        if "validation_loss" in record:
            detail.append(in_words(record))
        if detail:
            parts.append(" ".join([f"trainer {record['trainer']}:", *detail]))
    return "  ".join([f"round {records[0]['round']}", *parts]) if parts else ""


def _result_table(result: Record) -> Table:
    """The evaluation at the end: every trainer, the average of their anchors, and which one was saved."""
    table = Table(title=f"validation on {result['validation_targets']:,} targets")
    for title in ("weights", "loss", "", ""):
        table.add_column(title, justify="left" if title in ("weights", "") else "right", overflow="fold")
    for candidate in result["candidates"]:
        figure = in_words(candidate) if candidate.keys() - {"name", "validation_loss"} else ""
        saved = "saved" if candidate["name"] == result["saved"] else ""
        table.add_row(candidate["name"], f"{candidate['validation_loss']:.4f}", figure, saved)
    return table
