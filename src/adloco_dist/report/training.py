"""The figures of what a run learned, and of the batches and rounds with which it did."""

from collections.abc import Iterator

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
    over_rounds,
    size,
)
from adloco_dist.report.history import History, Numbers


def learning(history: History) -> Iterator[Figure | None]:
    """Losses, and what people compare beside them."""
    caption = "Faint: training, a mean over the round. Strong: validation, of the anchors."
    columns = {"training": "train_loss", "validation": "validation_loss"}
    yield _of_trainers(history, Chart("loss", "Loss", caption, "loss", columns, faint="training"))
    for name in ("perplexity", "accuracy"):
        column, is_log = {"": f"validation_{name}"}, name == "perplexity"
        chart = Chart(name, f"Validation {name}", "Of every trainer's anchor.", name, column, is_log=is_log)
        yield _of_trainers(history, chart)
    chart = Chart("update_losses", "Loss of every update", "A mean over the trainer's workers.", "loss")
    drawn = curve_points(history.axes, _update_losses(history), chart.y)
    yield curve_figure(chart, drawn, names=history.trainer_names)


def batches(history: History) -> Iterator[Figure | None]:
    """How large batches were and why, how they were computed, and how long rounds were."""
    title = "Total batch of a trainer"
    caption = "Strong: sequences of an update, over all workers. Faint: what the statistics asked for, before bounds."
    columns = {"asked for": "request", "taken": "total_batch"}
    chart = Chart("batch", title, caption, "sequences", columns, faint="asked for", is_log=True, is_stepped=True)
    yield _of_trainers(history, chart)
    yield _bounds(history)
    title, caption = "Micro-batches of an update", "Above 1, gradients are accumulated: the batch outgrew the device."
    yield _of_trainers(history, Chart("passes", title, caption, "micro-batches", is_stepped=True))
    yield _round_length(history)
    caption = "Batches far below it average too little noise away, far above it waste sequences."
    yield _of_trainers(history, Chart("noise_scale", "Gradient noise scale", caption, "sequences", is_log=True))
    caption = "Progress per second over that of one worker alone, at most. Below 1 the link costs more than the other "
    yield _of_trainers(history, Chart("worth", "What averaging is worth", f"{caption}workers bring.", "worth"))


def _of_trainers(history: History, chart: Chart) -> Figure | None:
    """A chart with curves for each trainer."""
    curves: list[Curve] = []
    for kind, column in (chart.columns or {"": chart.name}).items():
        values = history.values(column)
        for name, trainer in zip(history.trainer_names, history.trainers, strict=True):
            rows = history.rows_of(trainer)
            curves.append(Curve(name, values[rows], history.places[rows], kind))
    return curve_figure(chart, curve_points(history.axes, curves, chart.y), names=history.trainer_names)


def _round_length(history: History) -> Figure | None:
    """Updates and delay, which all trainers share."""
    caption = "Strong: H, updates between two outer steps. Faint: updates of delay."
    columns = {"H": "updates", "delay": "delay_updates"}
    chart = Chart("round_length", "Length of rounds", caption, "updates of a worker", columns, "delay", is_stepped=True)
    curves = [
        Curve("all trainers", history.highest(history.values(column)), np.arange(len(history.rounds)), kind)
        for kind, column in columns.items()
    ]
    return curve_figure(chart, curve_points(history.axes, curves, chart.y))


def _bounds(history: History) -> Figure | None:
    """A strip of every trainer that says what made its batch what it was."""
    begins = {name: np.concatenate([[0.0], ends[:-1]]) for name, ends in history.axes.items()}
    drawn: list[Point] = []
    for trainer in history.trainers:
        rows = history.rows_of(trainer)
        for first, last, word in stretches([history.bounds[row] for row in rows], history.places[rows]):
            span = {name: float(values[first]) for name, values in begins.items()}
            span |= {f"{name}_end": float(values[last]) for name, values in history.axes.items()}
            drawn.append({"series": word, "trainer": f"trainer {trainer}", **span})
    if not drawn:
        return None
    names = list(dict.fromkeys(str(point["series"]) for point in drawn))
    strip = alt.Chart(alt.NamedData(ROWS)).mark_bar()
    strip = strip.encode(
        x=over_rounds(),
        x2="round_end",
        y=alt.Y("trainer:N", title=None, sort=None),
        color=color(names, "bound").legend(alt.Legend(orient="bottom", columns=3)),
        tooltip=["trainer:N", "series:N", "round:Q", "round_end:Q"],
    ).properties(**size(max(60, 26 * len(history.trainers))))
    caption = "The setting that bounded the batch, `shard` or `measurable`, or the request, which no bound changed."
    return Figure("bounds", "What bounded the batch", caption, strip, drawn)


def stretches(values: list[str | None], places: Numbers) -> list[tuple[int, int, str]]:
    """Rounds in a row that have the same word: the places of the first and the last, and the word."""
    joined: list[tuple[int, int, str]] = []
    for value, place in zip(values, places.tolist(), strict=True):
        if value is not None and joined and joined[-1][2] == value and joined[-1][1] in (place, place - 1):
            joined[-1] = (joined[-1][0], place, value)
        elif value is not None:
            joined.append((place, place, value))
    return joined


def _update_losses(history: History) -> Iterator[Curve]:
    """The losses of single updates, where they were recorded."""
    for trainer in history.trainers:
        losses: list[float | None] = []
        places: list[float] = []
        for row in history.rows_of(trainer).tolist():
            of_round = history.rows[row].step_losses
            losses += of_round
            places += (history.places[row] + np.arange(1 - len(of_round), 1) / max(1, len(of_round))).tolist()
        yield Curve(f"trainer {trainer}", np.array(losses, np.float64), np.array(places))  # NaN for None
