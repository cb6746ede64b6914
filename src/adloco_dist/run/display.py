"""What the user sees: a live table and a bar on a terminal, one line per round elsewhere; the log has the lines too."""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean

import msgspec.structs
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from adloco_dist.config import Settings
from adloco_dist.messages import Json
from adloco_dist.policy.evaluation import in_words
from adloco_dist.policy.link import Rhythm, drift_factor
from adloco_dist.run.journal import Sink
from adloco_dist.run.rows import TrainerRow, merge_in_words, nonfinite_in_words
from adloco_dist.terminal import new_table
from adloco_dist.text import duration, in_bytes, in_short, one_line, set_of_ranks

log = logging.getLogger(__name__)

TITLES = ("trainer", "ranks", "workers", "batch", "passes", "noise scale", "tokens/s", "train loss")
"""Titles of the table's columns; behind them comes the figure of an evaluation that people compare."""
WIDE = 100
"""Characters of a terminal on which every title has room on one line."""
OTHER_LINES = 7
"""Lines of a terminal that show no trainer: titles, what is below the table, and the next prompt."""
RECENT_ROUNDS = 20
"""Rounds from which it is estimated how long the rest takes: batches, and so rounds, change."""

DOES_NOT_PAY = (
    "averaging does not pay on this link: one worker alone would make more progress per second (worth in metrics.jsonl)"
    "; wire=sparse, or larger batches, whose updates take longer, may change that"
)
TOO_SLOW = (
    "a rank is so slow that rounds have {updates} updates, as long as it needs for one, and it counts for little "
    "(worker_updates in metrics.jsonl); that costs the others about {cost:.0%} of the time, as they drift apart"
)
RISES = (
    "the validation loss has risen from {lowest:.4f} in round {round} to {latest:.4f}; where sequences are read again "
    "and again, a model learns them by heart: a smaller budget or more text helps"
)
RISE = 0.02
"""By what share of a trainer's lowest validation loss a later one is higher until it counts as that."""
SLOWNESS = 8
"""Updates of the fastest worker to one of the slowest from which on this is reported."""
UNPAID_ROUNDS, RISEN_EVALUATIONS = 5, 3
IN_A_ROW = {DOES_NOT_PAY: UNPAID_ROUNDS, TOO_SLOW: UNPAID_ROUNDS, RISES: RISEN_EVALUATIONS}
"""Rounds or evaluations in a row after which each is reported, once."""
LINES = 200
"""About how many lines report the rounds of a whole run where there is no terminal: rounds may be short and many."""


def too_slow_in_words(row: TrainerRow) -> str:
    """What a rank that is so slow costs the others in such a round."""
    updates = row.updates or 0
    cost = drift_factor(Rhythm(updates, row.delay_updates or 0)) - 1
    return TOO_SLOW.format(updates=updates, cost=cost)


class Display(Sink):
    """A sink for people."""

    def __init__(
        self, console: Console, settings: Settings, earlier_seconds: float = 0.0, earlier_bytes: int = 0
    ) -> None:
        """Begin to show a run; if it resumes, its earlier starts have taken some seconds and sent some bytes."""
        self._console, self._num_trainers, self._bytes_sent = console, settings.pool.trainers, earlier_bytes
        self._budget = budget = settings.budget_amount
        self._start, self._shown_share = time.monotonic() - earlier_seconds, -1.0
        self._passed: deque[tuple[float, float]] = deque(maxlen=RECENT_ROUNDS)
        """When rounds ended, and what of the budget was spent by then."""
        self._latest: dict[int, TrainerRow] = {}
        self._reported: set[tuple[int, str]] = set()
        self._in_a_row = Counter[tuple[int, str]]()
        self._lowest: dict[int, TrainerRow] = {}
        """By trainer, the round with its lowest validation loss."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} % of {task.fields[budget]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        shown = f"{budget.number:,} {budget.unit}"
        self._task = self._progress.add_task("training", total=budget.number, budget=shown, left="")
        self._live = Live(self._render(), console=console)
        if console.is_terminal:
            self._live.start()

    def write(self, rows: Sequence[TrainerRow]) -> None:
        self._report_notes(rows)
        for row in rows:
            if row.merge:
                self._say(merge_in_words(row))
            if row.nonfinite_workers:
                self._say(nonfinite_in_words(row))
        # Without the trainers that have ended. An evaluation stays on show until the next one.
        before = {trainer: row.evaluation for trainer, row in self._latest.items()}
        self._latest = {
            row.trainer: msgspec.structs.replace(row, **(before.get(row.trainer, {}) | row.evaluation)) for row in rows
        }
        self._bytes_sent += sum(sum(row.bytes_sent.values()) for row in rows)
        seconds = time.monotonic() - self._start
        counted = {"rounds": rows[0].round, "tokens": rows[0].pool_tokens, "seconds": rows[0].elapsed_seconds}
        done = counted[self._budget.unit] or 0
        self._passed.append((seconds, done))
        share, left = done / self._budget.number, self._left()
        self._progress.update(self._task, completed=done, description=f"round {rows[0].round}", left=left)
        is_new = share - self._shown_share >= 1 / LINES or any(row.evaluation for row in rows)
        if self._console.is_terminal:
            self._live.update(self._render())
        elif is_new and (trainers := [line for row in rows if (line := _trainer_in_words(row))]):
            self._shown_share = share
            passed = ", ".join(filter(None, [f"{100 * min(share, 1):.0f} %", left]))
            self._say("; ".join(filter(None, [f"round {rows[0].round} ({passed})", self._figures(", "), *trainers])))

    def close(self, result: Json | None) -> None:
        if self._console.is_terminal:
            self._live.stop()
        if result is not None and result["candidates"]:
            self._console.print(_result_table(result))

    def report_line(self, line: str) -> None:
        """Show a line that belongs to no row; from any thread."""
        self._say(f"note: {line}")

    def _left(self) -> str:
        """How long the rest takes, at the pace of the last rounds; empty where that is unknown."""
        (start, before), (seconds, done) = self._passed[0], self._passed[-1]
        rest = self._budget.number - done
        if done == before or rest <= 0:
            return ""
        return f"{duration(max(1, round(rest * (seconds - start) / (done - before))))} left"

    def _say(self, line: str) -> None:
        log.info("%s", line)
        self._console.print(one_line(line), soft_wrap=True)

    def _report_notes(self, rows: Sequence[TrainerRow]) -> None:
        """Print every note once; the rows hold it for each round that it is about."""
        notes = {(row.trainer, note) for row in rows for note in row.notes}
        for row in rows:
            is_unpaid = row.worth is not None and row.worth < 1
            is_slow = row.updates is not None and row.updates >= SLOWNESS * min(row.worker_updates, default=row.updates)
            holds = {DOES_NOT_PAY: is_unpaid, TOO_SLOW: is_slow}
            if row.validation_loss is not None:
                holds[RISES] = self._has_risen(row, row.validation_loss)
            for note, is_so in holds.items():
                self._in_a_row[row.trainer, note] = self._in_a_row[row.trainer, note] + 1 if is_so else 0
        notes |= {which for which, times in self._in_a_row.items() if times >= IN_A_ROW[which[1]]}
        by_trainer = {row.trainer: row for row in rows}
        for trainer, note in sorted(notes - self._reported):
            self._say(f"round {rows[0].round}, trainer {trainer}: {self._note_in_words(note, by_trainer[trainer])}")
        self._reported |= notes

    def _has_risen(self, row: TrainerRow, loss: float) -> bool:
        """Whether a trainer is worse than it was."""
        lowest = self._lowest.get(row.trainer, row).validation_loss
        if lowest is None or loss <= lowest:
            self._lowest[row.trainer] = row
            return False
        return loss - lowest > RISE * abs(lowest)

    def _note_in_words(self, note: str, row: TrainerRow) -> str:
        if note == TOO_SLOW:
            return too_slow_in_words(row)
        if note == RISES:
            lowest = self._lowest[row.trainer]
            return RISES.format(lowest=lowest.validation_loss, round=lowest.round, latest=row.validation_loss)
        return note

    def _figures(self, separator: str) -> str:
        """What the last round, and all rounds so far, came to for the whole pool; empty before the first."""
        rows = list(self._latest.values())
        if not rows or rows[0].updates is None:
            return ""
        in_updates = {rank: share for row in rows for rank, share in row.utilisation.items()}
        trainers = [f"{len(rows)} of {self._num_trainers} trainers"] if self._num_trainers > 1 else []
        figures = [
            f"{in_short(rows[0].pool_tokens or 0)} tokens",
            *trainers,
            f"H {rows[0].updates}",
            f"{100 * fmean(in_updates.values()):.0f} % in updates",
            f"{in_bytes(self._bytes_sent)} sent",
        ]
        return separator.join(figures)

    def _render(self) -> Group:
        rows = [row for _, row in sorted(self._latest.items())]
        evaluations = [row.evaluation for row in rows if row.evaluation]
        is_wide = self._console.width >= WIDE
        titles = (*TITLES, in_words(evaluations[0]).rpartition(" ")[0] if evaluations else "loss")
        table = new_table(title if is_wide else title.replace(" ", "\n") for title in titles)
        room = max(1, self._console.height - OTHER_LINES)
        for row in rows[:room]:
            table.add_row(
                str(row.trainer),
                set_of_ranks(row.ranks),
                str(row.workers),
                _shown(row.total_batch, ","),
                _shown(row.passes, ","),
                _shown(row.noise_scale, ",.1f"),
                _shown(None if row.tokens is None else row.tokens / sum(row.seconds.values()), ",.0f"),
                _shown(row.train_loss, ".3f"),
                in_words(row.evaluation).rpartition(" ")[2] if row.evaluation else "",
            )
        more = [f"and {len(rows) - room} more trainers"] if len(rows) > room else []
        return Group(table, *more, *filter(None, [self._figures("  ")]), self._progress)


def _shown(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _trainer_in_words(row: TrainerRow) -> str:
    """What there is to show of a trainer's round; empty before training where nothing was evaluated."""
    parts = []
    if row.train_loss is not None:
        passes = f" in {row.passes} passes" if row.passes and row.passes > 1 else ""
        parts += [f"batch {row.total_batch}{passes}", f"loss {row.train_loss:.3f}"]
    if row.evaluation:
        parts.append(in_words(row.evaluation))
    return f"trainer {row.trainer}: {', '.join(parts)}" if parts else ""


def _result_table(result: Json) -> Table:
    """The evaluation at the end: every trainer, the average of their anchors, and which one was saved."""
    table = Table(title=f"validation on {result['validation_targets']:,} targets")
    for title in ("weights", "loss", "", ""):
        table.add_column(title, justify="left" if title in ("weights", "") else "right", overflow="fold")
    for candidate in result["candidates"]:
        figure = in_words(candidate) if candidate.keys() - {"name", "validation_loss"} else ""
        saved = "saved" if candidate["name"] == result["saved"] else ""
        table.add_row(candidate["name"], f"{candidate['validation_loss']:.4f}", figure, saved)
    return table
