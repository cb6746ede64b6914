"""What is shown of an analysis of gradients: a table, a JSON file and a picture."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from adloco_dist.messages import Json, strict_json
from adloco_dist.terminal import new_console, new_table, report_line
from adloco_dist.text import printable

FIGURES_FILE, PICTURE_FILE = "gradients.json", "gradients.png"
INCHES, DOTS_PER_INCH = (12.0, 8.0), 100
TABLE_WIDTH = 150
NUM_BINS = 30
QUARTILES = ("lower_quartile", "median", "upper_quartile")


def show(result: Json, directory: Path) -> None:
    """Write the JSON file and the picture into `directory`, print the table, and where the files are."""
    result = strict_json(result)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FIGURES_FILE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, directory / PICTURE_FILE)
    new_console(min_width=TABLE_WIDTH).print(_table(result))
    report_line("G: of all these sequences; |g|, |g - G| / |G| and the cosine of g with G: medians over the batches")
    report_line(f"{PICTURE_FILE} and {FIGURES_FILE}: {directory}")


def _table(result: Json) -> Table:
    """A row for each batch size."""
    columns = ("batch", "batches", "|g|", "|g - G| / |G|", "quartiles", "cosine", "tr(Sigma)", "noise scale")
    asked = f"norm test asks for (eta {result['eta']:g})"
    table = new_table((*columns, asked), printable(_title(result)), has_lines=True)
    for row in result["batches"]:
        deviation, error = row["relative_deviation"], row["trace_error"]
        table.add_row(
            str(row["batch"]),
            f"{row['num_batches']:,}",
            _shown(row["norm"]["median"]),
            _shown(deviation["median"]),
            f"{_shown(deviation['lower_quartile'])} - {_shown(deviation['upper_quartile'])}",
            f"{row['cosine']['median']:.4f}",
            _shown(row["trace"]) + (f" ± {error:,.2g}" if error else ""),  # 0: exact
            _shown(row["noise_scale"]),
            _shown(row["request"]),
        )
    return table


def draw(result: Json, path: Path) -> None:
    """Write the picture, a PNG: distribution of the deviations; deviation, cosine and norm by batch size."""
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
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


def _title(result: Json) -> str:
    looked_at = f"{result['sequences']:,} of {result['split_sequences']:,} sequences, {result['split']} split"
    return f"{result['run']}\n{looked_at}; loss {result['loss']:.4f}, |G| {result['norm']:.4g}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _draw_histograms(axes: Axes, rows: Sequence[Json]) -> None:
    """Shares of the batches, in bins of equal ratio: some sequences deviate fifty times as far as most."""
    deviations = [np.array(row["values"]["relative_deviation"]) for row in rows]
    is_log = min(of_size.min() for of_size in deviations) > 0
    for row, values in zip(rows, deviations, strict=True):
        edges = np.geomspace(values.min(), 1.001 * values.max(), NUM_BINS + 1) if is_log else NUM_BINS
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, edges, weights=weights, histtype="stepfilled", alpha=0.5, label=f"batches of {row['batch']}")
    axes.set_xlabel("|g - G| / |G|")
    axes.set_ylabel("share of the batches")
    if is_log:
        axes.set_xscale("log")


def _draw_quartiles(axes: Axes, rows: Sequence[Json], name: str, label: str) -> None:
    """Medians, and bars from the lower to the upper quartile, by batch size."""
    sizes = [row["batch"] for row in rows]
    lower, median, upper = (np.array([row[name][key] for row in rows]) for key in QUARTILES)
    axes.errorbar(sizes, median, [median - lower, upper - median], fmt="o", capsize=4, label="median and quartiles")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch (sequences)")
    axes.set_ylabel(label)


def _draw_expected(axes: Axes, rows: Sequence[Json], result: Json) -> None:
    """What tr(Sigma) of the smallest batches, of which there are most, says of all; and what the norm test allows."""
    total, trace = result["sequences"], rows[0]["trace"]
    if trace:
        sizes = [row["batch"] for row in rows]
        roots = [math.sqrt(trace / size * (total - size) / (total - 1)) / result["norm"] for size in sizes]
        axes.plot(sizes, roots, "--", color="grey", label=f"root mean square, from tr(Sigma) at batch {sizes[0]}")
        axes.set_yscale("log")
    axes.axhline(result["eta"], color="tab:red", linewidth=1, label=f"norm test, eta {result['eta']:g}")
