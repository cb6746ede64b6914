"""What the runs of a sweep came to: a table on the terminal, and sweep.csv."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from adloco_dist.config import EXIT_STOPPED, SettingsError
from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.run.manifest import write_content
from adloco_dist.run.reading import read_run, saved_candidate
from adloco_dist.sweep.points import Point
from adloco_dist.terminal import new_console, report_line
from adloco_dist.text import one_line

RESULTS = {
    "loss": ".4f",
    "perplexity": ".3f",
    "accuracy": ".4f",
    "tokens": ",",
    "rounds": ",",
    "bytes_sent": ",",
    "seconds": ",.1f",
}
TABLE_WIDTH = 160
"""Characters of a line where the table is not shown on a terminal."""


@dataclass(frozen=True)
class Row:
    """What a run of the sweep came to."""

    point: Point
    state: str
    """finished, stopped (by request), or failed, which includes runs that never came to an end."""
    result: Mapping[str, float]
    """Its figures by name, as far as it has them; the loss is that of the model that it saved."""

    @classmethod
    def of(cls, point: Point, code: int | None) -> "Row":
        """What is in its directory, and the exit code of its driver if that ran now."""
        try:
            result = read_run(point.directory)["result"]
        except SettingsError:
            result = None
        saved = saved_candidate(result) or {}
        figures = {name.removeprefix("validation_"): value for name, value in saved.items()} | dict(result or {})
        known = {name: value for name in RESULTS if saved and isinstance(value := figures.get(name), int | float)}
        if result is not None and result["stop"] != INTERRUPTED:
            return cls(point, "finished", known)
        was_stopped = code == EXIT_STOPPED or (code is None and bool(known))
        return cls(point, "stopped" if was_stopped else "failed", known)


def show_table(rows: Sequence[Row]) -> None:
    """Print the rows, and where to look for the runs that have not finished."""
    table = Table(box=None, pad_edge=False)
    keys = list(rows[0].point.values)
    names = [key.rpartition(".")[2] for key in keys]
    for key, name in zip(keys, names, strict=True):
        table.add_column(name if names.count(name) == 1 else key, justify="right", overflow="fold")
    table.add_column("state")
    for name in RESULTS:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        figures = [format(row.result[name], spec) if name in row.result else "" for name, spec in RESULTS.items()]
        table.add_row(*map(one_line, row.point.values.values()), row.state, *figures)
    new_console(min_width=TABLE_WIDTH).print(table)
    for row in rows:
        if row.state != "finished":
            log = row.point.log
            report_line(f"{row.state}: {row.point.directory.name}: {_last_error(log)}; log: {log}")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The same rows for other programs; an empty field where a run has no such figure."""
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow([*rows[0].point.values, "state", *RESULTS, "directory"])
    for row in rows:
        figures = [row.result.get(name, "") for name in RESULTS]
        writer.writerow([*row.point.values.values(), row.state, *figures, row.point.directory])
    write_content(path, lines.getvalue().encode())


def _last_error(log: Path) -> str:
    """The last line of the log that reports an error, else its last line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "did not start"
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["printed nothing"])[-1]
