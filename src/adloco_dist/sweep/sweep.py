"""A sweep: every combination of the settings' values is a run of its own, here or through a Hydra launcher."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, Settings, SettingsError, TrackingMode
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.config.paths import quoted
from adloco_dist.config.without_effect import without_effect
from adloco_dist.messages import strict_json
from adloco_dist.report.processes import write_report
from adloco_dist.run.directory import archive, is_finished
from adloco_dist.run.manifest import write_content
from adloco_dist.run.reading import read_run, saved_candidate
from adloco_dist.sweep.here import LocalDrivers
from adloco_dist.sweep.jobs import launch_through
from adloco_dist.sweep.points import Launch, Point, expand, name_without_effect
from adloco_dist.terminal import new_console, report_line, reported_wait
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


def sweep(
    overrides: Sequence[str],
    compose: Callable[[Sequence[str]], Settings],
    program: Sequence[str],
    num_jobs: int,
    redo: bool,
) -> int:
    """Run every combination; the exit code: of a run that failed, else of one that was stopped, else 0.

    Args:
        overrides: settings, some with several values, and Hydra's own (hydra/launcher=slurm).
        compose: makes the settings of a run from its overrides.
        program: the arguments of the interpreter that start the driver of a run, its settings excluded.
        num_jobs: runs at one time on this machine.
        redo: run finished ones again, and keep the old under another name; else they are not run again.

    Raises:
        SettingsError: a mistake in any of the runs' settings; nothing was started then.
    """
    points, hydra_overrides = expand(overrides)
    with reported_wait(lambda: f"checking the settings of {len(points)} runs: still at it"):
        settings = [compose(point.overrides) for point in points]
        if not redo:
            for point, wanted in zip(points, settings, strict=True):
                _refuse_other_run(point.directory, wanted)
    unread = [without_effect(of_run, point.overrides) for of_run, point in zip(settings, points, strict=True)]
    notes = name_without_effect(points, unread)
    folder = points[0].directory.parent
    launch = _launch(hydra_overrides, folder, program, num_jobs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"hydra.sweep.dir={folder}: cannot be made ({error.strerror}); name another") from error
    due = {}
    for point, of_run in zip(points, settings, strict=True):
        if redo and is_finished(point.directory):
            archive("hydra.sweep.dir", point.directory)
        if not is_finished(point.directory):
            due[point.directory] = with_directory(point, of_run)
    for note in notes:
        report_line(f"note: {note}")
    report_line(f"sweep of {len(points)} runs, {len(points) - len(due)} of them finished before, in {folder}")
    codes = dict(zip(due, launch(list(due.values())), strict=True)) if due else {}
    rows = [Row.of(point, codes.get(point.directory)) for point in points]
    write_csv(folder / "sweep.csv", rows)
    show_table(rows)
    states = {row.state for row in rows}
    if "finished" in states and any(of_run.run.report for of_run in settings):
        report_line(write_report(folder))
    return EXIT_FAILURE if "failed" in states else EXIT_STOPPED if "stopped" in states else 0


def with_directory(point: Point, settings: Settings) -> Point:
    """A run that is due, as it is started. Where Weights & Biases is used, the sweep's runs are a group."""
    group = f"tracking.group={quoted(point.directory.parent.resolve().name)}"
    groups = [] if settings.tracking.mode is TrackingMode.disabled else [group]  # first: the user's own comes later
    directory = f"run.directory={quoted(str(point.directory))}"
    return replace(point, overrides=(*groups, *point.overrides, directory, "run.unfinished=resume"))


def _launch(hydra_overrides: Sequence[str], folder: Path, program: Sequence[str], num_jobs: int) -> Launch:
    """What starts the runs: the launcher that was asked for, else this machine."""
    chosen = [line.partition("=")[2] for line in hydra_overrides if line.startswith("hydra/launcher=")]
    if not chosen or chosen[-1] == "basic":
        return LocalDrivers(num_jobs, program).run_all
    return launch_through(chosen[-1], [*hydra_overrides, f"hydra.sweep.dir={quoted(str(folder))}"], program)


def _refuse_other_run(directory: Path, settings: Settings) -> None:
    """A finished run counts for a point only if it ran with the point's settings."""
    if not is_finished(directory):
        return
    ran, wanted = flatten(read_run(directory)["settings"]), flatten(strict_json(to_plain(settings)))
    for key, value in wanted.items():
        if ran.get(key) != value and not key.startswith(("run.", "tracking.")):
            rule = f"holds a finished run with {key}={ran.get(key)} instead of {value}"
            raise SettingsError(f"{directory}: {rule}; set another hydra.sweep.dir, or archive it with --redo")


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
        if is_finished(point.directory):
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
