"""The figures of one run: what was learned, with which batches, who merged, and where time and bytes went."""

import itertools
from collections.abc import Iterator, Sequence

import altair as alt
import numpy as np
import pyarrow as pa

from adloco_dist.report.figures import (
    MAX_LINES,
    ROWS,
    Curve,
    Figure,
    by_trainer,
    color,
    curves,
    line_figure,
    over_rounds,
    size,
    trainer_names,
)
from adloco_dist.report.history import History, Values
from adloco_dist.report.sampling import Point, kept, rounded, stretches

SOLID, DOTTED = (1, 0), (2, 3)
REQUEST = "the request itself"
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
Figures = Iterator[Figure | None]


def learning(history: History) -> Figures:
    """Losses, and what people compare beside them."""
    names = trainer_names(history)
    train = by_trainer(history, "train_loss", kind="training")
    validation = by_trainer(history, "validation_loss", kind="validation")
    yield line_figure(
        "loss", "Loss", "Dotted: training, a mean over the round. Solid: validation, of the anchors.", "loss",
        curves(history, "loss", [*train, *validation]), kinds={"training": DOTTED, "validation": SOLID}, names=names,
    )  # fmt: skip
    for figure in ("perplexity", "accuracy"):
        drawn = curves(history, figure, by_trainer(history, f"validation_{figure}"))
        yield line_figure(
            figure, f"Validation {figure}", "Of every trainer's anchor.", figure, drawn, names=names,
            is_log=figure == "perplexity",
        )  # fmt: skip
    yield line_figure(
        "update_losses", "Loss of every update", "A mean over the trainer's workers.", "loss", _update_losses(history),
        names=names,
    )  # fmt: skip


def batches(history: History) -> Figures:
    """How large batches were and why, how they were computed, and how long rounds were."""
    names = trainer_names(history)
    taken = by_trainer(history, "total_batch", kind="taken")
    asked = by_trainer(history, "request", kind="asked for")
    drawn = [point for point in curves(history, "sequences", [*taken, *asked]) if _positive(point, "sequences")]
    yield line_figure(
        "batch", "Total batch of a trainer",
        "Solid: sequences of an update, over all workers. Dotted: what the statistics asked for, before bounds.",
        "sequences", drawn, is_log=True, is_stepped=True, kinds={"asked for": DOTTED, "taken": SOLID},
        names=names,
    )  # fmt: skip
    yield _bounds(history)
    drawn = curves(history, "micro-batches", by_trainer(history, "passes"))
    yield line_figure(
        "passes", "Micro-batches of an update", "Above 1, gradients are accumulated: the batch outgrew the device.",
        "micro-batches", drawn, is_stepped=True, names=names,
    )  # fmt: skip
    found = [
        Curve("all trainers", history.highest(history.values(name)), _first_rows(history), kind)
        for name, kind in (("updates", "H"), ("delay_updates", "delay"))
    ]
    drawn = curves(history, "updates of a worker", found)
    yield line_figure(
        "round_length", "Length of rounds", "Solid: H, updates between two outer steps. Dotted: updates of delay.",
        "updates of a worker", drawn, is_stepped=True, kinds={"H": SOLID, "delay": DOTTED},
    )  # fmt: skip
    drawn = [
        point
        for point in curves(history, "sequences", by_trainer(history, "noise_scale"))
        if _positive(point, "sequences")
    ]
    yield line_figure(
        "noise_scale", "Gradient noise scale", "Batches far below it average too little noise away, far above it waste "
        "sequences.", "sequences", drawn, is_log=True, names=names,
    )  # fmt: skip
    drawn = curves(history, "worth", by_trainer(history, "worth"))
    yield line_figure(
        "worth", "What averaging is worth", "Progress per second over that of one worker alone, at most. Below 1 the "
        "link costs more than the other workers bring.", "worth", drawn, names=names,
    )  # fmt: skip


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
    rows = _first_rows(history)
    return [Curve(name, values, rows) for name, values in columns.items()]


def _first_rows(history: History) -> np.ndarray:
    """A row of every round."""
    return np.unique(history.row_rounds, return_index=True)[1]


def _bounds(history: History) -> Figure | None:
    """A strip of every trainer that says what made its batch what it was."""
    bounds, modes = history.words("bound"), history.words("mode")
    drawn: list[Point] = []
    for trainer in history.trainers:
        rows = [row for row in history.rows_of(trainer).tolist() if modes[row] is not None]
        places = history.places[rows] if rows else np.zeros(0, np.int64)
        for first, last, word in stretches([bounds[row] or REQUEST for row in rows], places):
            drawn.append({"series": word, "trainer": f"trainer {trainer}", **_span(history, first, last)})
    if not drawn:
        return None
    names = list(dict.fromkeys(str(point["series"]) for point in drawn))
    strip = (
        alt.Chart(alt.NamedData(ROWS))
        .mark_bar()
        .encode(
            x=over_rounds(),
            x2="round_end",
            y=alt.Y("trainer:N", title=None, sort=None),
            color=color(names, "bound").legend(alt.Legend(orient="bottom", columns=3)),
            tooltip=["trainer:N", "series:N", "round:Q", "round_end:Q"],
        )
    )
    caption = "The setting that bounded the batch, `shard` or `measurable`, or the request, which no bound changed."
    return Figure(
        "bounds",
        "What bounded the batch",
        caption,
        strip.properties(**size(max(60, 26 * len(history.trainers)))),
        drawn,
    )


def _span(history: History, first: int, last: int) -> Point:
    """From before the round at one place to the end of that at another."""
    begin = {name: float(values[first - 1]) if first else 0.0 for name, values in history.axes.items()}
    end = {f"{name}_end": float(values[last]) for name, values in history.axes.items()}
    return {**begin, **end}


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


def _update_losses(history: History) -> list[Point]:
    """The losses of single updates, where they were recorded; what has passed is taken evenly within a round."""
    if "step_losses" not in history.table.column_names:
        return []
    column = history.table["step_losses"].chunk(0)
    if not pa.types.is_list(column.type) or not pa.types.is_floating(column.type.value_type):
        return []
    ends = {name: np.concatenate([[0.0], values]) for name, values in history.axes.items()}
    drawn: list[Point] = []
    for trainer in history.trainers:
        rows = history.rows_of(trainer)
        lists = [losses.as_py() or [] for losses in column.take(pa.array(rows))]
        values = np.array(list(itertools.chain.from_iterable(lists)), dtype=np.float64)
        places = [
            history.places[row] + (number + 1) / len(losses)
            for row, losses in zip(rows.tolist(), lists, strict=True)
            for number in range(len(losses))
        ]
        where = np.array(places)
        axes = {name: np.interp(where, np.arange(len(end)), end) for name, end in ends.items()}
        chosen = kept(values)
        columns = {name: rounded(found[chosen]) for name, found in axes.items()}
        columns["loss"] = rounded(values[chosen])
        drawn += [
            {"series": f"trainer {trainer}", **dict(zip(columns, row, strict=True))}
            for row in zip(*columns.values(), strict=True)
        ]
    return drawn


def _positive(point: Point, name: str) -> bool:
    value = point[name]
    return isinstance(value, int | float) and value > 0


def drawn(figures: Sequence[Figure | None] | Figures) -> list[Figure]:
    """Those that there is something to draw of."""
    return [figure for figure in figures if figure]
