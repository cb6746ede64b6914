"""What the runs of a sweep came to: a table on the terminal, and sweep.csv."""

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from adloco_dist.config import EXIT_STOPPED, SettingsError
from adloco_dist.run.directory import is_finished
from adloco_dist.run.reading import read_run
from adloco_dist.terminal import new_console, report_line
from adloco_dist.text import one_line

Run = tuple[dict[str, str], Path, int | None, Path]
"""What sets a run apart, its directory, its driver's exit code (None: it did not run now), and its log."""

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


def state(directory: Path, code: int | None) -> str:
    """finished, stopped (by request), or failed, which includes runs that never came to an end."""
    if is_finished(directory):
        return "finished"
    if code == EXIT_STOPPED or (code is None and _result(directory)):
        return "stopped"
    return "failed"


def show_table(runs: Sequence[Run]) -> list[str]:
    """Print one row for each run, and where to look for those that failed; their states."""
    console = new_console(min_width=TABLE_WIDTH)
    table = Table(box=None, pad_edge=False)
    keys = list(runs[0][0])
    names = [key.rpartition(".")[2] for key in keys]
    for key, name in zip(keys, names, strict=True):
        table.add_column(name if names.count(name) == 1 else key, justify="right", overflow="fold")
    table.add_column("state")
    for name in RESULTS:
        table.add_column(name.replace("_", " "), justify="right")
    states = []
    for values, directory, code, _ in runs:
        states.append(state(directory, code))
        result = _result(directory)
        shown = [format(result[name], spec) if name in result else "" for name, spec in RESULTS.items()]
        table.add_row(*map(one_line, values.values()), states[-1], *shown)
    console.print(table)
    for (_, directory, _, log), outcome in zip(runs, states, strict=True):
        if outcome != "finished":
            report_line(f"{outcome}: {directory.name}: {_last_error(log)}; log: {log}")
    return states


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """The same rows for other programs; an empty field where a run has no such figure."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*runs[0][0], "state", *RESULTS, "directory"])
        for values, directory, code, _ in runs:
            result = _result(directory)
            figures = [result.get(name, "") for name in RESULTS]
            writer.writerow([*values.values(), state(directory, code), *figures, directory])
    temporary.replace(path)


def _result(directory: Path) -> dict[str, float]:
    """The figures of a run that has a result; the loss is that of the model that it saved."""
    try:
        result = read_run(directory)["result"]
    except SettingsError:
        return {}
    if result is None or not result["candidates"]:  # killed, or stopped early
        return {}
    saved = next(candidate for candidate in result["candidates"] if candidate["name"] == result["saved"])
    detail = {**{name.removeprefix("validation_"): value for name, value in saved.items()}, **result}
    return {name: value for name in RESULTS if isinstance(value := detail.get(name), int | float)}


def _last_error(log: Path) -> str:
    """The last line of the log that reports an error, else its last line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "did not start"
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["printed nothing"])[-1]
