"""The points of a sweep: every combination of the settings' values, named by what sets it apart."""

import hashlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import parse
from adloco_dist.config.paths import as_text

MAX_RUNS = 10_000
LONGEST_NAME = 150
"""Maximum length of a directory's name; most file systems end at 255 bytes."""


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
    def name(self) -> str:
        """What sets it apart, as a directory can be called."""
        return self.directory.name

    @property
    def log(self) -> Path:
        """What its driver printed."""
        return self.directory.with_name(self.name + ".log")


Launch = Callable[[Sequence[Point]], list[int]]
"""Runs the drivers of runs that are due; their exit codes, once all have ended."""


def expand(overrides: Sequence[str]) -> tuple[list[Point], list[str]]:
    """The points of a sweep, and the overrides that are for Hydra itself.

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
    folder = _folder(hydra, of_runs, swept)
    of_runs = [override for override in of_runs if override.key_or_group != "run.root"]  # `folder` is in it
    points = {}
    values_of = [_values(override) for override in of_runs]
    if math.prod(map(len, values_of)) > MAX_RUNS:
        lines = ", ".join(override.input_line or "" for override in swept)
        raise SettingsError(f"-m {lines}: more than {MAX_RUNS:,} runs; name fewer values")
    for combination in itertools.product(*values_of):
        chosen = list(zip(of_runs, combination, strict=True))
        typed = {override.get_key_element(): value for override, value in chosen if override in swept}
        directory = folder / _file_name(",".join(f"{key}={value}" for key, value in sorted(typed.items())))
        values = {key: as_text(value) for key, value in typed.items()}
        of_run = tuple(f"{override.get_key_element()}={value}" for override, value in chosen)
        points[directory] = Point(values, of_run, directory)
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


def name_without_effect(points: Sequence[Point], unread: Sequence[dict[str, str]]) -> list[str]:
    """Say which settings have no effect in some of the runs, a line for each.

    `unread` has for every point the overrides without effect, as they were typed, and why.

    Raises:
        SettingsError: the sweep is over one that has none in any run: all its values would give the same run.
    """
    reasons: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line, why in itertools.chain.from_iterable(of_run.items() for of_run in unread):
        reasons[line.partition("=")[0]].append((line, why))
    notes = []
    for key, of_runs in reasons.items():
        (line, why), is_swept = of_runs[0], key in points[0].values
        if is_swept and len(of_runs) == len(points):
            given = ",".join(dict.fromkeys(point.values[key] for point in points))
            raise SettingsError(f"-m {key}={given}: {why}; all its values give the same run: set that, or sweep others")
        notes.append(f"{key if is_swept else line}: in {len(of_runs)} of {len(points)} runs {why}")
    return notes
