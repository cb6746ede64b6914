"""The figures of what a run learned, and of the batches and rounds with which it did."""

import itertools

import altair as alt
import numpy as np
import pyarrow as pa

from adloco_dist.report.figures import (
    ROWS,
    Curve,
    Figure,
    Figures,
    by_trainer,
    color,
    curves,
    line_figure,
    over_rounds,
    size,
    trainer_names,
)
from adloco_dist.report.history import History
from adloco_dist.report.sampling import Point, kept, rounded, stretches

STRONG, FAINT = 1.0, 0.35
"""Opacities of curves of two kinds."""


def learning(history: History) -> Figures:
    """Losses, and what people compare beside them."""
    names = trainer_names(history)
    train = by_trainer(history, "train_loss", kind="training")
    validation = by_trainer(history, "validation_loss", kind="validation")
    yield line_figure(
        "loss", "Loss", "Faint: training, a mean over the round. Strong: validation, of the anchors.", "loss",
        curves(history, "loss", [*train, *validation]), kinds={"training": FAINT, "validation": STRONG}, names=names,
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
        "Strong: sequences of an update, over all workers. Faint: what the statistics asked for, before bounds.",
        "sequences", drawn, is_log=True, is_stepped=True, kinds={"asked for": FAINT, "taken": STRONG},
        names=names,
    )  # fmt: skip
    yield _bounds(history)
    drawn = curves(history, "micro-batches", by_trainer(history, "passes"))
    yield line_figure(
        "passes", "Micro-batches of an update", "Above 1, gradients are accumulated: the batch outgrew the device.",
        "micro-batches", drawn, is_stepped=True, names=names,
    )  # fmt: skip
    found = [
        Curve("all trainers", history.highest(history.values(name)), history.first_rows, kind)
        for name, kind in (("updates", "H"), ("delay_updates", "delay"))
    ]
    drawn = curves(history, "updates of a worker", found)
    yield line_figure(
        "round_length", "Length of rounds", "Strong: H, updates between two outer steps. Faint: updates of delay.",
        "updates of a worker", drawn, is_stepped=True, kinds={"H": STRONG, "delay": FAINT},
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


def _bounds(history: History) -> Figure | None:
    """A strip of every trainer that says what made its batch what it was."""
    drawn: list[Point] = []
    for trainer in history.trainers:
        rows = history.rows_of(trainer)
        for first, last, word in stretches(history.bounds[rows].tolist(), history.places[rows]):
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
