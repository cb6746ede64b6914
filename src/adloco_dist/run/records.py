"""Reading the records of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from adloco_dist.config import SettingsError
from adloco_dist.messages import decode
from adloco_dist.policy.regrouping import Origins, Regrouping
from adloco_dist.policy.replay import Trajectory
from adloco_dist.run.directory import METRICS_FILE
from adloco_dist.run.reading import decode_json
from adloco_dist.run.rows import Record, recorded_merge
from adloco_dist.terminal import report_error


class CandidateRow(TypedDict):
    """A member of a merge as the policy saw it, as far as anybody reads it."""

    request: float | None
    bounded: float
    is_finite: bool


class MergeRow(TypedDict):
    """A merge, as its survivor's row has it."""

    survivor: int
    shares: dict[str, float]
    candidates: dict[str, CandidateRow]
    policy: str
    idle_ranks: list[int]


class Row(TypedDict):
    """A line of metrics.jsonl, as far as anybody reads it: a trainer in a round, or before the first (round 0)."""

    round: int
    trainer: int
    ranks: NotRequired[list[int]]
    workers: NotRequired[int]
    total_batch: NotRequired[int]
    passes: NotRequired[int]
    mode: NotRequired[str]
    request: NotRequired[float | None]
    bound: NotRequired[str | None]
    noise_scale: NotRequired[float | None]
    smoothed: NotRequired[dict[str, float | bool | None] | None]
    notes: NotRequired[list[str]]
    origins: NotRequired[list[tuple[int, int]]]
    merge: NotRequired[MergeRow]


def read_records(setting: str, source: str, needs: Sequence[str] = ()) -> list[Record]:
    """The rows of metrics.jsonl. Lines that are none, as a power cut or a full disk leaves them, are skipped, which is
    reported on standard error.

    Args:
        setting: what named `source`, for the error.
        source: a run directory, or its metrics.jsonl.
        needs: what a row of a round must have to be of use.

    Raises:
        SettingsError: it is missing, or holds something else.
    """
    path = Path(source)
    try:
        path = path / METRICS_FILE if path.is_dir() else path
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except (OSError, ValueError) as error:
        remedy = f"name a run directory, or its {METRICS_FILE}"
        raise SettingsError(f"{setting}={source}: {path} cannot be read; {remedy}") from error
    records: list[Record] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line, needs))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if not records:
        rule = f"holds no record of a round ({problems[0]}); name a run's own {METRICS_FILE}"
        raise SettingsError(f"{setting}={source}: {rule}")
    if problems:
        detail = f"{len(problems)} of {len(lines)} lines are no records and are left out"
        report_error(f"note: {setting}={source}: {detail}, the first of them {problems[0]}")
    return records


def _record(line: bytes, needs: Sequence[str]) -> Record:
    """The row on a line.

    Raises:
        ValueError: there is none that anything can be done with.
    """
    row = decode_json(line)
    decode(Row, row)
    if row["round"] < 0 or row["trainer"] < 0:
        raise ValueError("a round or a trainer below 0")
    missing = [name for name in needs if row["round"] and not row.get(name)]
    if missing:
        raise ValueError(f"has no {missing[0]}")
    if "merge" in row:
        merge = recorded_merge(row)
        if merge.survivor not in merge.shares or merge.shares.keys() != merge.candidates.keys():
            raise ValueError("merge: names other trainers in its shares than in its candidates")
        if not all(0 <= share <= 1 for share in merge.shares.values()):
            raise ValueError("merge: a share that is not between 0 and 1")
    return row


def read_trajectory(setting: str, source: str) -> Trajectory:
    """The total batches that a run took and the merges that it made, by round.

    Raises:
        SettingsError: as in `read_records`, or rounds are missing.
    """
    batches: dict[int, dict[int, int]] = {}
    regrouped: dict[int, list[Record]] = {}
    for record in read_records(setting, source):
        trainer, round_, batch = record["trainer"], record["round"] - 1, record.get("total_batch")
        if round_ < 0:  # before training
            continue
        if batch is None or batch < 1:
            raise SettingsError(f"{setting}={source}: trainer {trainer} has no total_batch in round {round_ + 1}")
        batches.setdefault(round_, {})[trainer] = batch
        if "origins" in record:
            regrouped.setdefault(round_, []).append(record)
    if not batches:
        raise SettingsError(f"{setting}={source}: holds no round; name a run that has trained")
    regroupings = {round_: _regrouping(records) for round_, records in regrouped.items()}
    for round_ in range(max(batches)):
        if round_ not in batches:
            raise SettingsError(f"{setting}={source}: has no round {round_ + 1}; name the records of a whole run")
        following = regroupings.get(round_ + 1)
        ended = following.ended if following else set[int]()
        for trainer in sorted(batches.get(round_, {}).keys() - ended):
            if trainer not in batches.get(round_ + 1, {}):
                raise SettingsError(
                    f"{setting}={source}: trainer {trainer} has no total_batch in round {round_ + 2}; name the "
                    "records of a whole run"
                )
    return Trajectory(batches, regroupings)


def _regrouping(records: Sequence[Record]) -> Regrouping:
    """Return the regrouping from the records of the trainers that it concerned."""
    merges = tuple(recorded_merge(record) for record in records if "merge" in record)
    return Regrouping(merges, decode(Origins, {record["trainer"]: record["origins"] for record in records}))
