"""What the user sees: a live table and a bar on a terminal, one line per round elsewhere; the log has the lines too."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from adloco_dist.config import Settings
from adloco_dist.policy.evaluation import in_words
from adloco_dist.run.rows import Record, merge_in_words, nonfinite_in_words
from adloco_dist.text import duration, in_bytes, in_short, one_line, set_of_ranks

log = logging.getLogger(__name__)

TITLES = ("trainer", "ranks", "workers", "batch", "passes", "noise scale", "tokens/s", "train loss")
"""Of the table's columns; that of the last is what people compare of an evaluation."""
WIDE = 100
"""Characters of a terminal on which every title has room on one line."""
OTHER_LINES = 7
"""Lines of a terminal that are no row of a trainer: titles, what is below the table, and the next prompt."""
RECENT_ROUNDS = 20
"""Rounds from which it is estimated how long the rest takes: batches, and so rounds, change."""

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

    def __init__(
        self, console: Console, settings: Settings, earlier_seconds: float = 0.0, earlier_bytes: int = 0
    ) -> None:  # fmt: skip
        """
        Args:
            earlier_seconds, earlier_bytes: time taken and bytes sent by earlier starts of a run that resumes.
        """
        self._console = console
        (self._unit, limit), *_ = ((unit, limit) for unit, limit in vars(settings.budget).items() if limit is not None)
        self._num_trainers, self._bytes_sent = settings.pool.trainers, earlier_bytes
        self._start = time.monotonic() - earlier_seconds
        self._limit, self._shown_share = float(limit), -1.0
        self._passed: deque[tuple[float, float]] = deque(maxlen=RECENT_ROUNDS)
        """When rounds ended, and what of the budget was spent by then."""
        self._latest: dict[int, Record] = {}
        self._reported: set[tuple[int, str]] = set()
        self._unpaid_rounds: dict[int, int] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} % of {task.fields[budget]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        budget = f"{limit:,} {self._unit}"
        self._task = self._progress.add_task("training", total=float(limit), budget=budget, left="")
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
        self._bytes_sent += sum(sum(record["bytes_sent"].values()) for record in records)
        seconds, number = time.monotonic() - self._start, records[0]["round"]
        done = {"rounds": number, "tokens": records[0].get("pool_tokens", 0), "seconds": seconds}[self._unit]
        left = self._left(seconds, done)
        self._progress.update(self._task, completed=done, description=f"round {number}", left=left)
        share = done / self._limit
        is_new = share - self._shown_share >= 1 / LINES or any("validation_loss" in record for record in records)
        if self._console.is_terminal:
            self._live.update(self._render())
        elif is_new and (trainers := _trainers_in_words(records)):
            self._shown_share = share
            passed = ", ".join([f"{100 * min(share, 1):.0f} %", *([left] if left else [])])
            figures = ", ".join(self._figures())
            self._say("; ".join([f"round {number} ({passed})", *([figures] if figures else []), *trainers]))

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

    def _left(self, seconds: float, done: float) -> str:
        """How long the rest of the budget takes, at the pace of the last rounds; empty where that is unknown."""
        self._passed.append((seconds, done))
        (start, before), rest = self._passed[0], self._limit - done
        if rest <= 0 or done <= before:
            return ""
        return f"{duration(max(1, round(rest * (seconds - start) / (done - before))))} left"

    def _figures(self) -> list[str]:
        """What the last round, and all rounds so far, came to for the whole pool; nothing before the first."""
        records = list(self._latest.values())
        if not records or "updates" not in records[0]:
            return []
        spent_in_updates = {rank: share for record in records for rank, share in record["utilisation"].items()}
        trainers = [f"{len(records)} of {self._num_trainers} trainers"] if self._num_trainers > 1 else []
        return [
            f"{in_short(records[0]['pool_tokens'])} tokens",
            *trainers,
            f"H {records[0]['updates']}",
            f"{100 * fmean(spent_in_updates.values()):.0f} % in updates",
            f"{in_bytes(self._bytes_sent)} sent",
        ]

    def _render(self) -> Group:
        shown = sorted(self._latest.items())
        figure, *_ = [*(in_words(record).rpartition(" ")[0] for _, record in shown if _is_evaluated(record)), "loss"]
        is_wide = self._console.width >= WIDE
        table = Table(box=None, pad_edge=False)
        for title in (*TITLES, figure):
            table.add_column(title if is_wide else title.replace(" ", "\n"), justify="right")
        room = max(1, self._console.height - OTHER_LINES)
        for _, record in shown[:room]:
            seconds = sum(record["seconds"].values())
            table.add_row(
                str(record["trainer"]),
                set_of_ranks(record["ranks"]),
                str(record["workers"]),
                _shown(record, "total_batch", ","),
                _shown(record, "passes", ","),
                _shown(record, "noise_scale", ",.1f"),
                f"{record['tokens'] / seconds:,.0f}" if "tokens" in record else "",
                _shown(record, "train_loss", ".3f"),
                in_words(record).rpartition(" ")[2] if _is_evaluated(record) else "",
            )
        more = [f"and {len(shown) - room} more trainers"] if len(shown) > room else []
        figures = self._figures()
        return Group(table, *more, *(["  ".join(figures)] if figures else []), self._progress)


def _is_evaluated(record: Record) -> bool:
    return "validation_loss" in record


def _shown(record: Record, key: str, spec: str) -> str:
    """The value, or nothing where the record has none."""
    value = record.get(key)
    return "" if value is None else format(value, spec)


def _trainers_in_words(records: Sequence[Record]) -> list[str]:
    """What there is to show of each trainer's round; nothing before training where nothing was evaluated."""
    found = []
    for record in records:
        detail = []
        if "train_loss" in record:
            passes = f" in {record['passes']} passes" if record["passes"] > 1 else ""
            detail += [f"batch {record['total_batch']}{passes}", f"loss {record['train_loss']:.3f}"]
        if _is_evaluated(record):
            detail.append(in_words(record))
        if detail:
            found.append(f"trainer {record['trainer']}: {', '.join(detail)}")
    return found


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
