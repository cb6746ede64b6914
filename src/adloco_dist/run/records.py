"""Reading the records of a run."""

import json
from pathlib import Path
from typing import Any

from adloco_dist.config import SettingsError
from adloco_dist.decisions.merging import Merge
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
    merges: dict[int, tuple[Merge, ...]] = {}
    for record in read_records(setting, source):
        trainer, round_, batch = record["trainer"], record["round"] - 1, record.get("total_batch")
        if round_ < 0:  # before training
            continue
        if not isinstance(batch, int) or batch < 1:
            raise SettingsError(f"{setting}={source}: trainer {trainer} has no total_batch in round {round_ + 1}")
        batches.setdefault(round_, {})[trainer] = batch
        if "merge" in record:
            try:
                merges[round_] = (*merges.get(round_, ()), Merge.from_message(record["merge"]))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                told = f"the merge before round {round_ + 1} cannot be read"
                raise SettingsError(f"{setting}={source}: {told}; name a run's own {METRICS_FILE}") from error
    if not batches:
        raise SettingsError(f"{setting}={source}: holds no round; name a run that has trained")
    for round_ in range(max(batches)):
        ended = {trainer for merge in merges.get(round_ + 1, ()) for trainer in merge.ended}
        for trainer in sorted(batches.get(round_, {}).keys() - ended):
            if trainer not in batches.get(round_ + 1, {}):
                raise SettingsError(
                    f"{setting}={source}: trainer {trainer} has no total_batch in round {round_ + 2}; name the "
                    "records of a whole run"
                )
    return Trajectory(batches, merges)
