"""A sweep: every combination of the settings' values is a run of its own, here or through a Hydra launcher."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, Settings, SettingsError, TrackingMode
from adloco_dist.config.compose import flatten, to_plain
from adloco_dist.config.paths import quoted
from adloco_dist.config.without_effect import without_effect
from adloco_dist.messages import strict_json
from adloco_dist.report.processes import write_report
from adloco_dist.run.directory import archive, is_finished
from adloco_dist.run.reading import read_run
from adloco_dist.sweep.here import launch_here
from adloco_dist.sweep.jobs import launch_through
from adloco_dist.sweep.points import Launch, Point, expand, name_without_effect
from adloco_dist.sweep.table import Row, show_table, write_csv
from adloco_dist.terminal import report_line, reported_wait


def sweep(
    overrides: Sequence[str],
    compose: Callable[[Sequence[str]], Settings],
    program: Sequence[str],
    num_jobs: int,
    redo: bool,
) -> int:
    """Run every combination; the exit code: of a run that failed, else of one that was stopped, else 0.

    Runs that have finished before are not run again.

    Args:
        overrides: settings of which some have several values, and Hydra's own (hydra/launcher=slurm).
        compose: makes the settings of a run of its overrides.
        program: the arguments of the interpreter that start the driver of a run, its settings excluded.
        num_jobs: runs at one time on this machine.
        redo: run finished ones again; what they left is kept under another name.

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
    due: dict[Path, Point] = {}
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
        return launch_here(num_jobs, program)
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
