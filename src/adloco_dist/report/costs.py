"""The figures of what a run cost: the ranks' time, bytes, memory and devices."""

import altair as alt
import numpy as np

from adloco_dist.report.figures import (
    ROWS,
    Chart,
    Curve,
    Figure,
    Point,
    color,
    curve_figure,
    curve_points,
    kept,
    over_rounds,
    points,
    size,
)
from adloco_dist.report.history import History, Values

PHASES = {
    "inner": ("updates", "#4c78a8"),
    "measure": ("measuring gradients", "#72b7b2"),
    "outer": ("exposed averages", "#e45756"),
    "control": ("waiting for ranks", "#f58518"),
    "merge": ("merges", "#b279a2"),
    "evaluation": ("evaluation", "#54a24b"),
    "checkpoint": ("checkpoints", "#9d755d"),
    "transfer": ("hidden averages", "#bab0ac"),
}
"""Steps of a rank's round, with what they are called and their colours; the last went on beside the others."""
UTILISATION = Chart(
    "utilisation", "Share of the time in updates", "The rest of a rank's round: averages, waiting, evaluation.", "share"
)
RESOURCES = tuple(
    Chart(name, label.partition(",")[0].capitalize(), caption, label)
    for name, label, caption in (
        ("memory_bytes", "memory of the process, bytes", "Highest resident memory of each rank's process."),
        ("cpu_percent", "load of the processor, %", "100 % is one core."),
        ("gpu_memory_bytes", "memory of the GPU, bytes", "All processes on the GPU."),
        ("gpu_percent", "load of the GPU, %", "Share of the time in which the GPU was busy."),
        ("gpu_watts", "power of the GPU, W", "Mean of the samples in a round."),
        ("gpu_celsius", "temperature of the GPU, °C", "Highest sample in a round."),
    )
)
MAX_LINES = 12
"""Curves of ranks in one figure; of more, the highest, the median and the lowest are drawn."""
MAX_RANKS = 48
"""Bars of ranks; of more, those that computed least are shown."""


def bytes_sent(history: History) -> Figure | None:
    """What was sent, as areas on top of each other."""
    sent = {kind: np.cumsum(of_rounds) for kind, of_rounds in history.bytes_sent.items()}
    if not sent:
        return None
    places = np.unique(np.concatenate([*map(kept, sent.values())]))  # the same for all: a stack
    axes = {name: values[places] for name, values in history.axes.items()}
    drawn = [
        point for kind, added in sent.items() for point in points({"series": kind}, {**axes, "sent": added[places]})
    ]
    area = alt.Chart(alt.NamedData(ROWS)).mark_area(opacity=0.8)
    area = area.encode(
        x=over_rounds(),
        y=alt.Y("sent:Q", title="bytes sent", stack=True, axis=alt.Axis(format="~s")),
        color=color(list(sent), "kind"),
        tooltip=["series:N", "round:Q", alt.Tooltip("sent:Q", format=".3s")],
    ).properties(**size())
    return Figure("bytes", "Bytes sent by all ranks", "By kind of collective, added up.", area, drawn)


def rank_figure(history: History, chart: Chart) -> Figure | None:
    """UTILISATION, or one of RESOURCES: a number of every rank; of many, the highest, the median and the lowest."""
    by_rank: dict[int, Values] = {}
    for place, row in zip(history.places.tolist(), history.rows, strict=True):
        used = {rank: of_rank.get(chart.name) for rank, of_rank in row.resources.items()}
        for rank, number in (row.utilisation if chart is UTILISATION else used).items():
            if number is not None:
                by_rank.setdefault(rank, np.full(len(history.rounds), np.nan))[place] = number
    columns = {f"rank {rank}": by_rank[rank] for rank in sorted(by_rank)}
    if len(columns) > MAX_LINES:
        of_ranks = np.ma.masked_invalid(np.vstack([*columns.values()]))
        over_ranks = {"highest": np.ma.max, "median": np.ma.median, "lowest": np.ma.min}
        columns = {name: np.ma.filled(reduce(of_ranks, axis=0), np.nan) for name, reduce in over_ranks.items()}
    places = np.arange(len(history.rounds))
    curves = [Curve(series, values, places) for series, values in columns.items()]
    return curve_figure(chart, curve_points(history.axes, curves, chart.y), "rank")


def phases(history: History) -> Figure | None:
    """A bar of every rank, and below it what went on beside its steps."""
    spent = history.rank_seconds
    shown = sorted(sorted(spent, key=lambda rank: spent[rank].get("inner", 0.0))[:MAX_RANKS])
    drawn: list[Point] = [
        {
            "rank": f"rank {rank}",
            "series": phase,
            "lane": "beside" if step == "transfer" else "spent",
            "order": order,
            "seconds": float(f"{seconds:.6g}"),
        }
        for rank in shown
        for order, (step, (phase, _)) in enumerate(PHASES.items())
        if (seconds := spent[rank].get(step))
    ]
    if not drawn:
        return None
    colors = {phase: shade for phase, shade in PHASES.values() if any(point["series"] == phase for point in drawn)}
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    bars = alt.Chart(alt.NamedData(ROWS)).mark_bar()
    bars = bars.encode(
        x=alt.X("seconds:Q", title="seconds"),
        y=alt.Y("rank:N", title=None, sort=None),
        yOffset=alt.YOffset("lane:N", sort=["spent", "beside"]),
        order="order:Q",
        color=alt.Color("series:N", title=None, scale=scale, legend=alt.Legend(orient="bottom", columns=4)),
        tooltip=["rank:N", "series:N", alt.Tooltip("seconds:Q", format=",.3~f")],
    ).properties(**size(max(70, 36 * len(shown))))
    caption = "Upper bar: what each rank did. Lower bar: averages that travelled beside updates, and cost nothing."
    if len(spent) > len(shown):
        caption += f" Of {len(spent)} ranks, the {len(shown)} that computed least."
    return Figure("phases", "Time of each rank", caption, bars, drawn)
