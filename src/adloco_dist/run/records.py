"""Reading the records of a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adloco_dist.config import SettingsError
from adloco_dist.decisions.merging import Merge
from adloco_dist.decisions.regrouping import Regrouping, origins_from_message
from adloco_dist.decisions.replay import Trajectory
from adloco_dist.run.directory import METRICS_FILE


def read_records(setting: str, source: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl.

    Args:
        setting: what named `source`, for the error.
        source: a run directory, or its metrics.jsonl.

    Raises:
        SettingsError: it is missing, or holds something else.
    """
    path = Path(source) / METRICS_FILE if Path(source).is_dir() else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"name a run directory, or its {METRICS_FILE}"
        raise SettingsError(f"{setting}={source}: {path} cannot be read; {remedy}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append({**record, "round": int(record["round"]), "trainer": int(record["trainer"])})
        except (ValueError, KeyError, TypeError) as error:
            remedy = f"name a run's own {METRICS_FILE}"
            raise SettingsError(f"{setting}={source}: line {number} is not the record of a round; {remedy}") from error
    return records


def read_trajectory(setting: str, source: str) -> Trajectory:
    """The total batches that a run took and the merges that it made, by round.

    Raises:
        SettingsError: as `read_records`, or rounds are missing.
    """
    batches: dict[int, dict[int, int]] = {}
    regrouped: dict[int, list[dict[str, Any]]] = {}
    for record in read_records(setting, source):
        trainer, round_, batch = record["trainer"], record["round"] - 1, record.get("total_batch")
        if round_ < 0:  # before training
            continue
        if not isinstance(batch, int) or batch < 1:
            raise SettingsError(f"{setting}={source}: trainer {trainer} has no total_batch in round {round_ + 1}")
        batches.setdefault(round_, {})[trainer] = batch
        if "origins" in record:
            regrouped.setdefault(round_, []).append(record)
    if not batches:
        raise SettingsError(f"{setting}={source}: holds no round; name a run that has trained")
    try:
        regroupings = {round_: _regrouping(records) for round_, records in regrouped.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{setting}={source}: its merges cannot be read; name a run's own {METRICS_FILE}"
        ) from error
    for round_ in range(max(batches)):
        following = regroupings.get(round_ + 1)
        ended = following.ended if following else set[int]()
        for trainer in sorted(batches.get(round_, {}).keys() - ended):
            if trainer not in batches.get(round_ + 1, {}):
                raise SettingsError(
                    f"{setting}={source}: trainer {trainer} has no total_batch in round {round_ + 2}; name the "
                    "records of a whole run"
                )
    return Trajectory(batches, regroupings)


def _regrouping(records: Sequence[dict[str, Any]]) -> Regrouping:
    """From the records of the trainers that it concerned."""
    merges = tuple(Merge.from_message(record["merge"]) for record in records if "merge" in record)
    return Regrouping(merges, origins_from_message({record["trainer"]: record["origins"] for record in records}))
