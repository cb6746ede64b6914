"""The figures of what a run cost: the ranks' time, bytes, memory and devices."""

import altair as alt
import numpy as np

from adloco_dist.report.figures import (
    MAX_LINES,
    ROWS,
    Curve,
    Figure,
    Figures,
    color,
    curves,
    line_figure,
    over_rounds,
    size,
)
from adloco_dist.report.history import History, Values
from adloco_dist.report.sampling import Point, kept, rounded

PHASES = {
    "inner": "updates",
    "measure": "measuring gradients",
    "outer": "exposed averages",
    "control": "waiting for ranks",
    "merge": "merges",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "transfer": "hidden averages",
}
"""Steps of a rank's round, and what they are called; the last went on beside the others."""
COLORS = ("#4c78a8", "#72b7b2", "#e45756", "#f58518", "#b279a2", "#54a24b", "#9d755d", "#bab0ac")
RESOURCES = {
    "memory_bytes": ("memory of the process, bytes", "Highest resident memory of each rank's process."),
    "cpu_percent": ("load of the processor, %", "100 % is one core."),
    "gpu_memory_bytes": ("memory of the GPU, bytes", "All processes on the GPU."),
    "gpu_percent": ("load of the GPU, %", "Share of the time in which the GPU was busy."),
    "gpu_watts": ("power of the GPU, W", "Mean of the samples in a round."),
    "gpu_celsius": ("temperature of the GPU, °C", "Highest sample in a round."),
}
MAX_RANKS = 48
"""Bars of ranks; of more, those that computed least are shown."""


def time(history: History) -> Figures:
    """Where the ranks' time went."""
    yield _phases(history)
    yield line_figure(
        "utilisation", "Share of the time in updates", "The rest of a rank's round: averages, waiting, evaluation.",
        "share", curves(history, "share", _by_rank(history, "utilisation")), series="rank",
    )  # fmt: skip


def link(history: History) -> Figures:
    """What was sent."""
    found = [
        Curve(kind, np.cumsum(history.totals(history.values("bytes_sent", kind))), np.arange(len(history.rounds)))
        for kind in history.names("bytes_sent")
    ]
    drawn: list[Point] = []
    steps = np.unique(np.concatenate([[], *(kept(curve.values) for curve in found)])).astype(np.int64)
    for curve in found:
        columns = {name: rounded(values[steps]) for name, values in history.axes.items()}
        columns["sent"] = rounded(curve.values[steps])
        rows = zip(*columns.values(), strict=True)
        drawn += [{"series": curve.series, **dict(zip(columns, row, strict=True))} for row in rows]
    if drawn:
        names = [curve.series for curve in found]
        area = (
            alt.Chart(alt.NamedData(ROWS))
            .mark_area(opacity=0.8)
            .encode(
                x=over_rounds(),
                y=alt.Y("sent:Q", title="bytes sent", stack=True, axis=alt.Axis(format="~s")),
                color=color(names, "kind"),
                tooltip=["series:N", "round:Q", alt.Tooltip("sent:Q", format=".3s")],
            )
        )
        yield Figure(
            "bytes", "Bytes sent by all ranks", "By kind of collective, added up.", area.properties(**size()), drawn
        )


def resources(history: History) -> Figures:
    """What processes and devices used."""
    for name, (label, caption) in RESOURCES.items():
        drawn = curves(history, label, _by_rank(history, "resources", name))
        yield line_figure(name, label.partition(",")[0].capitalize(), caption, label, drawn, series="rank")


def _by_rank(history: History, *path: str) -> list[Curve]:
    """A number of every rank in every round; of many ranks the highest, the median and the lowest."""
    columns: dict[str, Values] = {}
    for rank in sorted(history.names(path[0]), key=int):
        values = np.full(len(history.rounds), np.nan)
        np.fmax.at(values, history.places, history.values(path[0], rank, *path[1:]))
        columns[f"rank {rank}"] = values
    if len(columns) > MAX_LINES:
        known = np.vstack(list(columns.values()))
        known = known[:, np.isfinite(known).any(axis=0)]
        whole = np.full((3, len(history.rounds)), np.nan)
        present = np.isfinite(np.vstack(list(columns.values()))).any(axis=0)
        whole[:, present] = [np.nanmax(known, 0), np.nanmedian(known, 0), np.nanmin(known, 0)]
        columns = dict(zip(("highest", "median", "lowest"), whole, strict=True))
    return [Curve(name, values, history.first_rows) for name, values in columns.items()]


def _phases(history: History) -> Figure | None:
    """A bar of every rank, and below it what went on beside its steps."""
    drawn: list[Point] = []
    ranks = sorted(history.names("rank_seconds"), key=int)
    spent = {rank: _spent(history, rank) for rank in ranks}
    shown = sorted(ranks, key=lambda rank: spent[rank].get("inner", 0.0))[:MAX_RANKS]
    for rank in sorted(shown, key=int):
        for order, (step, phase) in enumerate(PHASES.items()):
            if seconds := spent[rank].get(step):
                lane = "beside" if step == "transfer" else "spent"
                drawn.append(
                    {"rank": f"rank {rank}", "series": phase, "lane": lane, "order": order,
                     "seconds": float(f"{seconds:.6g}")}
                )  # fmt: skip
    if not drawn:
        return None
    names = [phase for phase in PHASES.values() if any(point["series"] == phase for point in drawn)]
    shades = [COLORS[list(PHASES.values()).index(phase)] for phase in names]
    bars = (
        alt.Chart(alt.NamedData(ROWS))
        .mark_bar()
        .encode(
            x=alt.X("seconds:Q", title="seconds"),
            y=alt.Y("rank:N", title=None, sort=None),
            yOffset=alt.YOffset("lane:N", sort=["spent", "beside"]),
            order="order:Q",
            color=alt.Color(
                "series:N", title=None, scale=alt.Scale(domain=names, range=shades),
                legend=alt.Legend(orient="bottom", columns=4),
            ),
            tooltip=["rank:N", "series:N", alt.Tooltip("seconds:Q", format=",.3~f")],
        )
    )  # fmt: skip
    caption = "Upper bar: what each rank did. Lower bar: averages that travelled beside updates, and cost nothing."
    if len(ranks) > len(shown):
        caption += f" Of {len(ranks)} ranks, the {len(shown)} that computed least."
    return Figure("phases", "Time of each rank", caption, bars.properties(**size(max(70, 36 * len(shown)))), drawn)


def _spent(history: History, rank: str) -> dict[str, float]:
    """Seconds of a rank by step: what trainers on it share is counted once."""
    found = {}
    for step in history.names("rank_seconds", rank):
        values = history.values("rank_seconds", rank, step)
        if step in ("control", "merge", "checkpoint"):
            of_round = np.zeros(len(history.rounds))
            np.fmax.at(of_round, history.places, np.nan_to_num(values))
            found[step] = float(of_round.sum())
        else:
            found[step] = float(np.nansum(values))
    return found
