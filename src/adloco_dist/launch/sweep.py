"""A sweep: every combination of the settings' values is a run of its own, here or through a Hydra launcher."""

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override

from adloco_dist.config import EXIT_FAILURE, EXIT_STOPPED, Settings, SettingsError
from adloco_dist.config.compose import compose, flatten, parse, to_plain
from adloco_dist.config.paths import quoted
from adloco_dist.launch.launcher import prepare_launch
from adloco_dist.launch.slots import deal_slots, run_here
from adloco_dist.run.directory import is_finished, read_run, set_aside
from adloco_dist.run.journal import strict_json
from adloco_dist.terminal import tell, told_wait
from adloco_dist.tools.sweeps import show_table, write_csv

MOST_RUNS = 10_000
LONGEST_NAME = 150
"""Of a directory; most file systems end at 255 bytes."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    values: dict[str, str]
    """What sets it apart: every swept setting and its value here."""
    overrides: tuple[str, ...]
    """All of the run's settings, as a user would type them."""
    directory: Path
    """Named by what sets it apart."""

    @property
    def log(self) -> Path:
        """What its driver printed."""
        return self.directory.with_name(self.directory.name + ".log")

    def arguments(self, options: Sequence[str]) -> list[str]:
        """Of the driver that runs it."""
        return [*options, *self.overrides, f"run.directory={quoted(str(self.directory))}", "run.unfinished=resume"]


def sweep(overrides: Sequence[str], options: Sequence[str], num_jobs: int, redo: bool) -> int:
    """Run every combination; the exit code: of a run that failed, else of one that was stopped, else 0.

    Runs that have finished before are not run again.

    Args:
        overrides: settings of which some have several values, and Hydra's own (hydra/launcher=slurm).
        options: of the driver, for every run.
        num_jobs: runs at one time on this machine.
        redo: run finished ones again; what they left is kept under another name.

    Raises:
        SettingsError: a mistake in any of the runs' settings; nothing was started then.
    """
    points, hydra_overrides = expand(overrides)
    with told_wait(lambda: f"checking the settings of {len(points)} runs: still at it"):
        for point in points:
            settings = compose(point.overrides)
            if not redo and is_finished(point.directory):
                _refuse_other_run(point.directory, settings)
    folder = points[0].directory.parent
    through = _launcher(hydra_overrides)
    slots = deal_slots(num_jobs) if through is None else []
    launch = prepare_launch(through, [*hydra_overrides, f"hydra.sweep.dir={quoted(str(folder))}"]) if through else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"hydra.sweep.dir={folder}: cannot be made ({error.strerror}); name another") from error
    if redo:
        for point in points:
            if is_finished(point.directory):
                set_aside("hydra.sweep.dir", point.directory)
    due = [point for point in points if not is_finished(point.directory)]
    tell(f"sweep of {len(points)} runs, {len(points) - len(due)} of them finished before, in {folder}")
    if launch is None:
        codes = run_here([(point.directory.name, point.arguments(options), point.log) for point in due], slots)
    else:
        codes = launch([point.arguments([]) for point in due], options) if due else []
    code_of = dict(zip((point.directory for point in due), codes, strict=True))
    rows = [(point.values, point.directory, code_of.get(point.directory), point.log) for point in points]
    write_csv(folder / "sweep.csv", rows)
    states = show_table(rows)
    return EXIT_FAILURE if "failed" in states else EXIT_STOPPED if "stopped" in states else 0


def _refuse_other_run(directory: Path, settings: Settings) -> None:
    """A finished run counts for a point only if it ran with the point's settings."""
    ran, wanted = flatten(read_run(directory)["settings"]), flatten(strict_json(to_plain(settings)))
    for key, value in wanted.items():
        if ran.get(key) != value and not key.startswith("run."):
            told = f"holds a finished run with {key}={ran.get(key)} instead of {value}"
            raise SettingsError(f"{directory}: {told}; set another hydra.sweep.dir, or keep it aside with --redo")


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
        raise SettingsError("-m: no setting has several values; write them as batching.eta=0.5,0.8, or leave -m out")
    for override in of_runs:
        if override.key_or_group == "run.directory":
            line = "a sweep names its runs' directories by their settings; set hydra.sweep.dir"
            raise SettingsError(f"{override.input_line}: {line}")
    folder = _folder(hydra, of_runs, swept)
    points = {}
    values_of = [_values(override) for override in of_runs]
    count = math.prod(map(len, values_of))
    if count > MOST_RUNS:
        told = ", ".join(override.input_line or "" for override in swept)
        raise SettingsError(f"-m {told}: more than {MOST_RUNS:,} runs; name fewer values")
    for combination in itertools.product(*values_of):
        chosen = [(override.get_key_element(), value) for override, value in zip(of_runs, combination, strict=True)]
        values = {key: value for override, (key, value) in zip(of_runs, chosen, strict=True) if override in swept}
        directory = folder / _file_name(",".join(f"{key}={value}" for key, value in sorted(values.items())))
        points[directory] = Point(values, tuple(f"{key}={value}" for key, value in chosen), directory)
    return list(points.values()), [override.input_line or "" for override in hydra]


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise SettingsError(f"{override.input_line}: names no values one by one; write them as a,b,c or range(a,b)")
    return list(itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))  # a range may have any number


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
