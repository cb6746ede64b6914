"""The batches and merges of another run, read from its records to be repeated."""

from pathlib import Path

from adloco_dist.config import SettingsError
from adloco_dist.policy.replay import Trajectory
from adloco_dist.run.rows import METRICS_FILE, TrainerRow, parse_rows
from adloco_dist.terminal import report_error


def read_trajectory(setting: str, source: str) -> Trajectory:
    """The total batches that a run took and the merges that it made, by round.

    Raises:
        SettingsError: as in `read_rows`, or rounds are missing.
    """
    rows = [row for row in read_rows(setting, source) if row.round]
    batches: dict[int, dict[int, int]] = {}
    for row in rows:
        batches.setdefault(row.round - 1, {})[row.trainer] = row.total_batch or 0
    merges = {row.round - 1: row.merge for row in rows if row.merge}
    if 0 not in batches:
        raise SettingsError(f"{setting}={source}: has no round 1; name the records of a whole run")
    trainers = set(batches[0])
    for round_ in range(max(batches) + 1):
        if round_ in merges:
            trainers -= set(merges[round_].ended)
        for trainer in sorted(trainers):
            if not batches.get(round_, {}).get(trainer):
                rule = f"trainer {trainer} has no total_batch in round {round_ + 1}; name the records of a whole run"
                raise SettingsError(f"{setting}={source}: {rule}")
        trainers = set(batches[round_])
    return Trajectory(batches, merges)


def read_rows(setting: str, source: str) -> list[TrainerRow]:
    """The rows of a run directory, or of its metrics.jsonl, which a setting names. Lines that are none, as a power cut
    or a full disk leaves them, are skipped, which is reported on standard error.

    Raises:
        SettingsError: it is missing, or holds something else.
    """
    path = Path(source)
    try:
        path = path / METRICS_FILE if path.is_dir() else path
        rows, problems = parse_rows(path.read_bytes())
    except (OSError, ValueError) as error:
        remedy = f"name a run directory, or its {METRICS_FILE}"
        raise SettingsError(f"{setting}={source}: {path} cannot be read; {remedy}") from error
    if not rows:
        detail = problems[0] if problems else "it is empty"
        raise SettingsError(f"{setting}={source}: holds no record of a round ({detail}); name a run's {METRICS_FILE}")
    if problems:
        detail = f"{len(problems)} of {len(rows) + len(problems)} lines are no records and are left out"
        report_error(f"note: {setting}={source}: {detail}, the first of them {problems[0]}")
    return rows
