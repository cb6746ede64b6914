"""What is shown of an analysis of gradients: quartiles and histograms; a table, a JSON file and a picture."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from rich.table import Table

from adloco_dist.config import SettingsError
from adloco_dist.run.directory import existing_part
from adloco_dist.run.journal import strict_json
from adloco_dist.run.rows import Record
from adloco_dist.terminal import new_console, report_line
from adloco_dist.text import printable
from adloco_dist.tools.deviation import Vector

FIGURES_FILE, PICTURE_FILE = "gradients.json", "gradients.png"
INCHES, DOTS_PER_INCH = (12.0, 8.0), 100
TABLE_WIDTH = 150
NUM_BINS = 30


def quartiles(values: Vector) -> dict[str, float]:
    """Mean, median, and the quartiles on both sides of it."""
    lower, median, upper = np.percentile(values, [25, 50, 75]).tolist()
    return {"mean": float(values.mean()), "lower_quartile": lower, "median": median, "upper_quartile": upper}


def histogram(values: Vector) -> dict[str, list[float]]:
    """How many of the values (>= 0) are in each of NUM_BINS bins, and the NUM_BINS + 1 edges of these.

    The bins reach from the smallest value to the largest (where all are equal, a little further), and every edge is the
    one before times the same factor: some sequences deviate fifty times as far as most. Where a value is 0, the bins
    are of equal width.
    """
    minimum, largest = float(values.min()), float(values.max())
    spaced = np.geomspace if minimum > 0 else np.linspace
    edges = spaced(minimum, max(largest, minimum * 1.001, 1e-12), NUM_BINS + 1)
    return {"counts": np.histogram(values, edges)[0].tolist(), "edges": edges.tolist()}


def check_place(directory: Path) -> None:
    """Refuse to put files where none can be.

    Raises:
        SettingsError: `directory` cannot be made or written.
    """
    existing = existing_part(directory)
    is_place = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if not is_place:
        raise SettingsError.of(
            "--output", directory, f"{existing} is not a directory that can be written; name another"
        )


def show(result: Record, directory: Path) -> None:
    """Write the JSON file and the picture into `directory`, print the table, and where the files are."""
    result = strict_json(result)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FIGURES_FILE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, directory / PICTURE_FILE)
    console = new_console(min_width=TABLE_WIDTH)
    console.print(_table(result))
    report_line("G: of all these sequences; |g|, |g - G| / |G| and the cosine of g with G: medians over the batches")
    report_line(f"{PICTURE_FILE} and {FIGURES_FILE}: {directory}")


def _table(result: Record) -> Table:
    """A row for each batch size."""
    table = Table(title=printable(_title(result)))
    titles = ("batch", "batches", "|g|", "|g - G| / |G|", "quartiles", "cosine", "tr(Sigma)", "noise scale")
    for title in (*titles, f"norm test asks for (eta {result['eta']:g})"):
        table.add_column(title, justify="right")
    for row in result["batches"]:
        norm, deviation, cosine = row["norm"], row["relative_deviation"], row["cosine"]
        table.add_row(
            str(row["batch"]), f"{row['num_batches']:,}", _shown(norm["median"]), _shown(deviation["median"]),
            f"{_shown(deviation['lower_quartile'])} - {_shown(deviation['upper_quartile'])}",
            f"{cosine['median']:.4f}", _trace(row), _shown(row["noise_scale"]), _shown(row["request"]),
        )  # fmt: skip
    return table


def draw(result: Record, path: Path) -> None:
    """Write the picture, a PNG: distribution of the deviations; deviation, cosine and norm by batch size.

    Args:
        result: as gradients.json has it.
    """
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    bins, deviation, cosine, norm = figure.subplots(2, 2).flat
    figure.suptitle(_title(result), parse_math=False)
    rows = result["batches"]
    # Batches of all sequences deviate by rounding alone, far below all others.
    smaller = [row for row in rows if row["batch"] < result["sequences"]] or rows
    _draw_histograms(bins, smaller)
    _draw_quartiles(deviation, smaller, "relative_deviation", "|g - G| / |G|")
    _draw_expected(deviation, smaller, result)
    _draw_quartiles(cosine, rows, "cosine", "cosine of g with G")
    cosine.axhline(1.0, color="grey", linewidth=1)
    _draw_quartiles(norm, rows, "norm", "|g|")
    norm.axhline(result["norm"], color="grey", linewidth=1, label="|G|")
    for axes in (bins, deviation, norm):
        axes.legend()
    figure.savefig(path, format="png")


def _title(result: Record) -> str:
    looked_at = f"{result['sequences']:,} of {result['split_sequences']:,} sequences, {result['split']} split"
    return f"{result['run']}\n{looked_at}; loss {result['loss']:.4f}, |G| {result['norm']:.4g}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _trace(row: Record) -> str:
    """Show tr(Sigma), with its standard error where it is not exact and there is one."""
    return f"{_shown(row['trace'])} ± {row['trace_error']:,.2g}" if row["trace_error"] else _shown(row["trace"])


def _draw_histograms(axes: Axes, rows: Sequence[Record]) -> None:
    for row in rows:
        shares = [count / row["num_batches"] for count in row["histogram"]["counts"]]
        axes.stairs(shares, row["histogram"]["edges"], fill=True, alpha=0.5, label=f"batches of {row['batch']}")
    axes.set_xlabel("|g - G| / |G|")
    axes.set_ylabel("share of the batches")
    if all(row["histogram"]["edges"][0] > 0 for row in rows):
        axes.set_xscale("log")


def _draw_quartiles(axes: Axes, rows: Sequence[Record], name: str, label: str) -> None:
    """Medians, and bars from the lower to the upper quartile, by batch size."""
    sizes = [row["batch"] for row in rows]
    medians = [row[name]["median"] for row in rows]
    below = [row[name]["median"] - row[name]["lower_quartile"] for row in rows]
    above = [row[name]["upper_quartile"] - row[name]["median"] for row in rows]
    axes.errorbar(sizes, medians, [below, above], fmt="o", capsize=4, label="median and quartiles")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FixedFormatter([str(size) for size in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch (sequences)")
    axes.set_ylabel(label)


def _draw_expected(axes: Axes, rows: Sequence[Record], result: Record) -> None:
    """What tr(Sigma) of the smallest batches, of which there are most, says of all; and what the norm test allows."""
    total, trace = result["sequences"], rows[0]["trace"]
    if trace:
        sizes = [row["batch"] for row in rows]
        roots = [math.sqrt(trace / size * (total - size) / (total - 1)) / result["norm"] for size in sizes]
        axes.plot(sizes, roots, "--", color="grey", label=f"root mean square, from tr(Sigma) at batch {sizes[0]}")
        axes.set_yscale("log")
    axes.axhline(result["eta"], color="tab:red", linewidth=1, label=f"norm test, eta {result['eta']:g}")
