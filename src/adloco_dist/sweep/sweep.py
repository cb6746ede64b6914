"""A sweep: every combination of the settings' values is a run of its own, here or through a Hydra launcher."""

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hydra.core.override_parser.types import Override

from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, Settings, SettingsError, TrackingMode
from adloco_dist.config.compose import flatten, parse, to_plain
from adloco_dist.config.paths import as_text, quoted
from adloco_dist.config.without_effect import without_effect
from adloco_dist.report.processes import write_report
from adloco_dist.run.directory import archive, is_finished, read_run
from adloco_dist.run.journal import strict_json
from adloco_dist.sweep.jobs import prepare_launch
from adloco_dist.sweep.slots import deal_slots, run_here
from adloco_dist.sweep.table import show_table, write_csv
from adloco_dist.terminal import report_line, reported_wait

MAX_RUNS = 10_000
LONGEST_NAME = 150
"""Maximum length of a directory's name; most file systems end at 255 bytes."""


class Program(Protocol):
    """What every run of a sweep is."""

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of the interpreter that start its driver, settings excluded."""
        ...

    def compose(self, overrides: Sequence[str]) -> Settings:
        """The settings of a run."""
        ...


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    values: dict[str, str]
    """What sets it apart: every swept setting and its value here."""
    overrides: tuple[str, ...]
    """All of the run's settings, as a user would type them."""
    directory: Path
    """The run directory, named by what sets it apart."""

    @property
    def log(self) -> Path:
        """What its driver printed."""
        return self.directory.with_name(self.directory.name + ".log")

    def arguments(self, options: Sequence[str], is_tracked: bool) -> list[str]:
        """Return the arguments of the driver that runs it.

        Args:
            is_tracked: Weights & Biases is used, where the sweep's runs are a group.
        """
        group = f"tracking.group={quoted(self.directory.parent.resolve().name)}"
        directory = f"run.directory={quoted(str(self.directory))}"
        groups = [group] if is_tracked else []  # first: the user's own comes later
        return [*options, *groups, *self.overrides, directory, "run.unfinished=resume"]


def sweep(overrides: Sequence[str], program: Program, options: Sequence[str], num_jobs: int, redo: bool) -> int:
    """Run every combination; the exit code: of a run that failed, else of one that was stopped, else 0.

    Runs that have finished before are not run again.

    Args:
        overrides: settings of which some have several values, and Hydra's own (hydra/launcher=slurm).
        options: options of the driver, for every run.
        num_jobs: runs at one time on this machine.
        redo: run finished ones again; what they left is kept under another name.

    Raises:
        SettingsError: a mistake in any of the runs' settings; nothing was started then.
    """
    points, hydra_overrides = expand(overrides)
    wants_report, tracked, unread = False, set[Path](), list[dict[str, str]]()
    with reported_wait(lambda: f"checking the settings of {len(points)} runs: still at it"):
        for point in points:
            settings = program.compose(point.overrides)
            wants_report |= settings.run.report
            tracked |= {point.directory} if settings.tracking.mode is not TrackingMode.disabled else set()
            unread.append(without_effect(settings, point.overrides))
            if not redo and is_finished(point.directory):
                _refuse_other_run(point.directory, settings)
    notes = _name_without_effect(points, unread)
    folder = points[0].directory.parent
    through = _launcher(hydra_overrides)
    slots = deal_slots(num_jobs) if through is None else []
    launch = (
        prepare_launch(through, [*hydra_overrides, f"hydra.sweep.dir={quoted(str(folder))}"], program.command)
        if through
        else None
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"hydra.sweep.dir={folder}: cannot be made ({error.strerror}); name another") from error
    if redo:
        for point in points:
            if is_finished(point.directory):
                archive("hydra.sweep.dir", point.directory)
    due = [point for point in points if not is_finished(point.directory)]
    for note in notes:
        report_line(f"note: {note}")
    report_line(f"sweep of {len(points)} runs, {len(points) - len(due)} of them finished before, in {folder}")
    if launch is None:
        arguments = [point.arguments(options, point.directory in tracked) for point in due]
        jobs = [(point.directory.name, given, point.log) for point, given in zip(due, arguments, strict=True)]
        codes = run_here(jobs, slots, program.command)
    else:
        codes = launch([point.arguments([], point.directory in tracked) for point in due], options) if due else []
    code_of = dict(zip((point.directory for point in due), codes, strict=True))
    rows = [(point.values, point.directory, code_of.get(point.directory), point.log) for point in points]
    write_csv(folder / "sweep.csv", rows)
    states = show_table(rows)
    if wants_report and "finished" in states:
        report_line(write_report(folder))
    return EXIT_FAILURE if "failed" in states else EXIT_STOPPED if "stopped" in states else 0


def _name_without_effect(points: Sequence[Point], unread: Sequence[dict[str, str]]) -> list[str]:
    """Say which settings have no effect in some of the runs, a line for each.

    Args:
        unread: what has no effect and why, by override as it was typed, for every point.

    Raises:
        SettingsError: the sweep is over one that has none in any run: all its values would give the same run.
    """
    reasons: dict[str, list[tuple[str, str]]] = {}
    for of_run in unread:
        for line, why in of_run.items():
            reasons.setdefault(line.partition("=")[0], []).append((line, why))
    notes = []
    for key, of_runs in reasons.items():
        (line, why), is_swept, is_everywhere = of_runs[0], key in points[0].values, len(of_runs) == len(points)
        if is_swept and is_everywhere:
            given = ",".join(dict.fromkeys(point.values[key] for point in points))
            raise SettingsError(f"-m {key}={given}: {why}; all its values give the same run: set that, or sweep others")
        notes.append(f"{key if is_swept else line}: in {len(of_runs)} of {len(points)} runs {why}")
    return notes


def _refuse_other_run(directory: Path, settings: Settings) -> None:
    """A finished run counts for a point only if it ran with the point's settings."""
    ran, wanted = flatten(read_run(directory)["settings"]), flatten(strict_json(to_plain(settings)))
    for key, value in wanted.items():
        if ran.get(key) != value and not key.startswith(("run.", "tracking.")):
            detail = f"holds a finished run with {key}={ran.get(key)} instead of {value}"
            raise SettingsError(f"{directory}: {detail}; set another hydra.sweep.dir, or archive it with --redo")


def expand(overrides: Sequence[str]) -> tuple[list[Point], list[str]]:
    """The points of a sweep, and those overrides that are for Hydra itself.

    Raises:
        SettingsError: an override cannot be read, or none has several values.
    """
    parsed = parse(overrides)
    hydra = [override for override in parsed if override.key_or_group.startswith("hydra")]
    of_runs = [override for override in parsed if override not in hydra]
    swept = [override for override in of_runs if override.is_sweep_override()]
    if not swept:
        raise SettingsError("-m: no setting has several values; write them as inner.lr=5e-4,1e-3, or leave -m out")
    for override in of_runs:
        if override.key_or_group == "run.directory" or (override.key_or_group == "run.root" and override in swept):
            line = "a sweep names its runs' directories by their settings; set hydra.sweep.dir"
            raise SettingsError(f"{override.input_line}: {line}")
        if override.key_or_group == "tracking.name" and override not in swept:
            line = "all runs of the sweep would have this name; leave it out, and set tracking.group"
            raise SettingsError(f"{override.input_line}: {line}")
    folder = _folder(hydra, of_runs, swept)
    of_runs = [override for override in of_runs if override.key_or_group != "run.root"]  # `folder` is in it
    points = {}
    values_of = [_values(override) for override in of_runs]
    count = math.prod(map(len, values_of))
    if count > MAX_RUNS:
        detail = ", ".join(override.input_line or "" for override in swept)
        raise SettingsError(f"-m {detail}: more than {MAX_RUNS:,} runs; name fewer values")
    for combination in itertools.product(*values_of):
        chosen = [(override.get_key_element(), value) for override, value in zip(of_runs, combination, strict=True)]
        typed = {key: value for override, (key, value) in zip(of_runs, chosen, strict=True) if override in swept}
        directory = folder / _file_name(",".join(f"{key}={value}" for key, value in sorted(typed.items())))
        values = {key: as_text(value) for key, value in typed.items()}
        points[directory] = Point(values, tuple(f"{key}={value}" for key, value in chosen), directory)
    return list(points.values()), [override.input_line or "" for override in hydra]


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise SettingsError(f"{override.input_line}: names no values one by one; write them as a,b,c or range(a,b)")
    values = list(itertools.islice(override.sweep_string_iterator(), MAX_RUNS + 1))  # a range may have any number
    if not values:
        raise SettingsError(f"{override.input_line}: names no value; write them as a,b,c or range(a,b)")
    return values


def _folder(hydra: Sequence[Override], of_runs: Sequence[Override], swept: Sequence[Override]) -> Path:
    """hydra.sweep.dir, else a name that another grid of the same settings shares, so that it finds what has run."""
    given = {override.key_or_group: str(override.value()) for override in [*hydra, *of_runs]}
    if "hydra.sweep.dir" in given:
        return Path(given["hydra.sweep.dir"])
    name = "_".join(["sweep", *sorted(override.key_or_group.split(".")[-1] for override in swept)])
    fixed = sorted(override.input_line or "" for override in of_runs if override not in swept)
    if fixed:
        name += "-" + _digest("\n".join(fixed))
    return Path(given.get("run.root", "runs")) / _file_name(name)


def _file_name(name: str) -> str:
    """`name` as a directory can be called; one that had to be changed bears its digest, so that names stay apart."""
    plain = re.sub(r"[^\w.,=+\-]", "_", name)
    return plain if plain == name and len(name) <= LONGEST_NAME else f"{plain[:LONGEST_NAME]}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _launcher(hydra_overrides: Sequence[str]) -> str | None:
    """The launcher that was asked for; None: this machine."""
    chosen = [line.partition("=")[2] for line in hydra_overrides if line.startswith("hydra/launcher=")]
    return chosen[-1] if chosen and chosen[-1] != "basic" else None
