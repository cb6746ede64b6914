"""Why the batches of a run were what they were: `launch/batches.py RUN`."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from adloco_dist.config import SettingsError, as_tool
from adloco_dist.run.records import read_records
from adloco_dist.terminal import new_console

TABLE_WIDTH = 160
COLUMNS = {
    "round": "round",
    "total_batch": "batch",
    "mode": "mode",
    "passes": "passes",
    "request": "asked for",
    "bound": "bound",
    "trace": "tr(Sigma)",
    "squared_norm": "|G|^2",
    "noise_scale": "noise scale",
    "updates": "H",
    "delay_updates": "delay",
    "exposed": "exposed",
    "worth": "worth",
    "notes": "notes",
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/batches.py."""
    parser = argparse.ArgumentParser(
        description="Show why a run's batches were what they were, round by round. The statistics of a row are the "
        "running averages that its request stands on, measured in the rounds before.",
    )
    parser.add_argument("run", help="run directory, or its metrics.jsonl")
    parser.add_argument("--trainer", type=int, help="one trainer alone")
    options = parser.parse_args(arguments)
    console = new_console(min_width=TABLE_WIDTH)
    with as_tool():
        for table in batch_tables(options.run, options.trainer):
            console.print(table)


def batch_tables(source: str, trainer: int | None) -> list[Table]:
    """One table for each trainer.

    Raises:
        SettingsError: no records there, or no such trainer.
    """
    records = read_records("RUN", source)
    trainers = sorted({record["trainer"] for record in records})
    if trainer is not None and trainer not in trainers:
        raise SettingsError(f"--trainer={trainer}: the run has trainers {', '.join(map(str, trainers))}")
    chosen = trainers if trainer is None else [trainer]
    return [_table(one, [record for record in records if record["trainer"] == one]) for one in chosen]


def _table(trainer: int, records: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"trainer {trainer}")
    for title in COLUMNS.values():
        table.add_column(title, justify="left" if title in ("mode", "bound", "notes") else "right")
    known: dict[str, Any] = {}
    for record in records:
        if record["round"]:
            row = {
                **record,
                **(known.get("smoothed") or {}),
                "noise_scale": known.get("noise_scale"),
                "exposed": _exposed(known),
            }
            table.add_row(*(_shown(row.get(key)) for key in COLUMNS))
        known = record
    return table


def _exposed(record: Mapping[str, Any]) -> float | None:
    """The smallest share of a round that a rank spent otherwise than in updates: what the link takes."""
    shares = record.get("utilisation")
    return 1 - max(shares.values()) if shares else None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(value)
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
