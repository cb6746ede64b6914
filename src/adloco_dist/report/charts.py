"""The figures of one run: what it learned, its batches and rounds, and what it cost in time, bytes and memory."""

from collections.abc import Iterator
from dataclasses import replace

import altair as alt
import numpy as np

from adloco_dist.report.columns import GRADIENT_NORM, Numbers
from adloco_dist.report.figures import (
    POINTER,
    Chart,
    Curve,
    Figure,
    Point,
    choosable,
    color,
    curve_figure,
    kept,
    new_chart,
    over_rounds,
    rounded,
    tips,
)
from adloco_dist.report.history import History, OfRanks
from adloco_dist.run.reading import Candidate
from adloco_dist.run.rows import is_known

PHASES = {
    "inner": ("updates", "#4c78a8"),
    "measure": ("measuring gradients", "#72b7b2"),
    "outer": ("averages", "#e45756"),
    "wait": ("waiting for averages", "#ff9da6"),
    "control": ("waiting for ranks", "#f58518"),
    "merge": ("merges", "#b279a2"),
    "evaluation": ("evaluation", "#54a24b"),
    "checkpoint": ("checkpoints", "#9d755d"),
    "transfer": ("hidden averages", "#bab0ac"),
}
"""Steps of a rank's round, with what they are called and their colours; the last went on beside the others."""
THROUGHPUT = Chart("throughput", "Tokens per second", "Of all trainers, by the clock of each round.", "tokens / s")
UTILISATION = Chart(
    "utilisation", "Share of the time in updates", "The rest of a rank's round: averages, waiting, evaluation.", "share"
)
TRANSFER = Chart(
    "transfer",
    "Time that averages travel",
    "Beside updates, until they have arrived on each rank. It grows where the link becomes slower, and scatters where "
    "packets are late or lost.",
    "seconds of a round",
)
RESENT = Chart(
    "resent_packets", "Packets sent again", "Of all connections of a rank's host, since they were lost.", "TCP segments"
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


def learning(history: History, saved: Candidate | None = None) -> Iterator[Figure | None]:
    """Losses, and what people compare beside them.

    Args:
        saved: what the run has saved, with its validation loss; None: nothing yet.
    """
    caption = "Faint: training, a mean over the round. Strong: validation, of the anchors."
    columns = {"training": "train_loss", "validation": "validation_loss"}
    loss = _of_trainers(history, Chart("loss", "Loss", caption, "loss", columns, faint="training"))
    yield loss and _with_saved(loss, history, saved)
    caption, columns = "Of every trainer's anchor.", {"": "validation_accuracy"}
    yield _of_trainers(history, Chart("accuracy", "Validation accuracy", caption, "accuracy", columns))
    caption = "Of a worker's last update in the round; with Muon, of the matrices."
    yield _of_trainers(history, Chart("learning_rate", "Learning rate", caption, "rate", is_stepped=True))
    caption = "Of the average difference to the anchor, before the outer step."
    columns = {"": "pseudo_gradient_norm"}
    yield _of_trainers(history, Chart("outer_norm", "Norm of the pseudo-gradient", caption, "norm", columns))
    caption = "Of the first updates of rounds that measure gradients, without their noise."
    yield _of_trainers(history, Chart(GRADIENT_NORM, "Norm of the gradient", caption, "norm"))
    chart = Chart("update_losses", "Loss of every update", "A mean over the trainer's workers.", "loss")
    yield curve_figure(chart, list(_update_losses(history)))


def _with_saved(loss: Figure, history: History, saved: Candidate | None) -> Figure:
    """The chart of losses with a diamond where the run has come to."""
    if not saved or not is_known(saved["validation_loss"]):
        return loss
    end = {axis: rounded(ends[-1:])[0] for axis, ends in history.axes.items()}
    point: Point = {"saved": saved["name"], **end, "loss": saved["validation_loss"]}
    mark = new_chart().transform_filter("isValid(datum.saved)")
    mark = mark.mark_point(shape="diamond", size=POINTER, filled=True, color="#e45756", clip=False)
    mark = mark.encode(x=over_rounds(), y="loss:Q", tooltip=tips("saved:N", "round:Q", "loss:Q"))
    assert loss.pointer
    curves, pointer = (part.transform_filter("!isValid(datum.saved)") for part in (loss.layers, loss.pointer))
    caption = f"{loss.caption} Diamond: what was saved, on the sequences of the result."
    layers, points = alt.layer(curves, mark), [*loss.points, point]
    return replace(loss, caption=caption, layers=layers, points=points, pointer=pointer)


def batches(history: History) -> Iterator[Figure | None]:
    """How large batches were and why, how they were computed, and how long rounds were."""
    title = "Total batch of a trainer"
    caption = "Strong: sequences of an update, over all workers. Faint: what the statistics asked for, before bounds."
    columns = {"asked for": "request", "taken": "total_batch"}
    chart = Chart("batch", title, caption, "sequences", columns, faint="asked for", is_log=True, is_stepped=True)
    yield _of_trainers(history, chart)
    yield _bounds(history)
    title, caption = "Micro-batches of an update", "Above 1, gradients are accumulated: the batch outgrew the device."
    if np.nanmax(history.values("passes"), initial=1) > 1:
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
        for trainer in history.trainers:
            rows = history.rows_of(trainer)
            curves.append(Curve(f"trainer {trainer}", history.axes, values[rows], history.places[rows], kind))
    return curve_figure(chart, curves)


def _round_length(history: History) -> Figure | None:
    """Updates and delay, which all trainers share."""
    caption = "Strong: H, updates between two outer steps. Faint: updates of delay."
    columns = {"H": "updates", "delay": "delay_updates"}
    chart = Chart("round_length", "Length of rounds", caption, "updates of a worker", columns, "delay", is_stepped=True)
    curves = [
        Curve("all trainers", history.axes, history.highest(history.values(column)), kind=kind)
        for kind, column in columns.items()
    ]
    return curve_figure(chart, curves)


def _bounds(history: History) -> Figure | None:
    """A strip of every trainer that says what made its batch what it was."""
    begins = {name: np.concatenate([[0.0], ends[:-1]]) for name, ends in history.axes.items()}
    drawn: list[Point] = []
    for trainer in history.trainers:
        bounds = history.bounds(trainer).items()
        spans = [(*span, bound) for bound, rows in bounds for span in stretches(history.places[rows])]
        for first, last, bound in sorted(spans):
            span = {name: float(values[first]) for name, values in begins.items()}
            span |= {f"{name}_end": float(values[last]) for name, values in history.axes.items()}
            drawn.append({"series": bound, "trainer": f"trainer {trainer}", **span})
    if not drawn:
        return None
    names = list(dict.fromkeys(str(point["series"]) for point in drawn))
    strip = new_chart(max(60, 26 * len(history.trainers))).mark_bar()
    strip = strip.encode(
        x=over_rounds(),
        x2=alt.X2("round_end"),
        y=alt.Y("trainer:N", title=None, sort=None),
        color=color(names, "bound", is_filled=True),
        tooltip=tips("trainer:N", "series:N", "round:Q", "round_end:Q"),
    )
    strip = choosable(strip, {"series": names}, 1.0)
    caption = "The setting that bounded the batch, an epoch of its shard, what can be measured, or the request itself."
    return Figure("bounds", "What bounded the batch", caption, strip, drawn)


def stretches(places: Numbers) -> list[tuple[int, int]]:
    """Rounds in a row: the places of the first and the last of each stretch of some, which ascend."""
    breaks = np.flatnonzero(np.diff(places) > 1)
    spans = np.split(places, breaks + 1) if len(places) else []
    return [(int(span[0]), int(span[-1])) for span in spans]


def _update_losses(history: History) -> Iterator[Curve]:
    """The losses of single updates, where they were recorded."""
    losses = history.grouped("step_losses").get("loss")
    if losses is None:
        return
    for trainer in history.trainers:
        chosen = history.row_trainers[losses.rows] == trainer
        rows, firsts, which, counts = np.unique(
            losses.rows[chosen], return_index=True, return_inverse=True, return_counts=True
        )
        left = firsts[which] + counts[which] - 1 - np.arange(len(which))  # updates until the round's end
        places = history.places[rows][which] - left / counts[which]
        yield Curve(f"trainer {trainer}", history.axes, losses.values[chosen], places)


def bytes_sent(history: History) -> Figure | None:
    """What was sent, as areas on top of each other."""
    if not history.bytes_sent:
        return None
    places = kept(history.axes["bytes"])  # the same for all: a stack
    curves = [Curve(kind, history.axes, np.cumsum(sent)[places], places) for kind, sent in history.bytes_sent.items()]
    drawn = [point for curve in curves for point in curve.points("sent")]
    kinds = list(history.bytes_sent)
    area = new_chart().mark_area()
    area = area.encode(
        x=over_rounds(),
        y=alt.Y("sent:Q", title="bytes sent", stack=True, axis=alt.Axis(format="~s")),
        color=color(kinds, "kind", is_filled=True),
        tooltip=[*tips("series:N", "round:Q"), alt.Tooltip("sent:Q", format=".3s")],
    )
    area = choosable(area, {"series": kinds}, 0.8)
    return Figure("bytes", "Bytes sent by all ranks", "By kind of collective, added up.", area, drawn)


def throughput(history: History) -> Figure | None:
    """Tokens that the pool trains on per second."""
    tokens, seconds = (np.diff(history.axes[axis], prepend=0.0) for axis in ("tokens", "seconds"))
    was_trained = (seconds > 0) & (history.rounds > 0)
    rates = np.divide(tokens, seconds, out=np.full(len(tokens), np.nan), where=was_trained)
    return curve_figure(THROUGHPUT, [Curve("all trainers", history.axes, rates)])


def utilisation(history: History) -> Figure | None:
    """The share of every rank's time that is spent in updates."""
    return _of_ranks(history, UTILISATION, history.utilisation)


def transfer(history: History) -> Figure | None:
    """How long the averages of every rank travel while it computes."""
    return _of_ranks(history, TRANSFER, history.transfer_seconds)


def resource(history: History, chart: Chart) -> Figure | None:
    """RESENT, or one of RESOURCES."""
    return _of_ranks(history, chart, history.resources.get(chart.name, {}))


def _of_ranks(history: History, chart: Chart, by_rank: OfRanks) -> Figure | None:
    """A number of every rank; of many ranks the highest, the median and the lowest."""
    columns = {f"rank {rank}": by_rank[rank] for rank in sorted(by_rank)}
    if len(columns) > MAX_LINES:
        of_ranks = np.ma.masked_invalid(np.vstack([*columns.values()]))
        over_ranks = {"highest": np.ma.max, "median": np.ma.median, "lowest": np.ma.min}
        columns = {name: np.ma.filled(reduce(of_ranks, axis=0), np.nan) for name, reduce in over_ranks.items()}
    return curve_figure(chart, [Curve(name, history.axes, values) for name, values in columns.items()], "rank")


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
    bars = new_chart(max(70, 36 * len(shown))).mark_bar()
    bars = bars.encode(
        x=alt.X("seconds:Q", title="seconds"),
        y=alt.Y("rank:N", title=None, sort=None),
        yOffset=alt.YOffset("lane:N", sort=["spent", "beside"]),
        order=alt.Order("order:Q"),
        color=alt.Color("series:N", title=None, scale=scale, legend=alt.Legend(orient="bottom", columns=4)),
        tooltip=[*tips("rank:N", "series:N"), alt.Tooltip("seconds:Q", format=",.3~f")],
    )
    bars = choosable(bars, {"series": list(colors)}, 1.0)
    caption = "Upper bar: what each rank did. Lower bar: averages that travelled beside updates, and cost nothing."
    if len(spent) > len(shown):
        caption += f" Of {len(spent)} ranks, the {len(shown)} that computed least."
    return Figure("phases", "Time of each rank", caption, bars, drawn)
