"""The page of several runs: their curves together, what they came to, and what it took them."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import altair as alt
import numpy as np

from adloco_dist.config.compose import as_typed
from adloco_dist.report.figures import Chart, Curve, Figure, Point, curve_figure, new_chart
from adloco_dist.report.page import Page, Section, Table
from adloco_dist.report.pool import UNKNOWN, loss_in_words
from adloco_dist.report.source import Source
from adloco_dist.run.reading import saved_candidate
from adloco_dist.run.rows import is_known
from adloco_dist.text import duration, in_bytes

OF_PLACE = ("run.", "tracking.")
"""Settings that say where a run is, not what it is."""
SEED = "seed"
CELL = 44
"""Pixels of a cell of the heat map."""
DARK = 0.179
"""Luminance at which white and black have the same contrast (WCAG 2.2, section 1.4.3); below it white has more."""
MAX_SETTINGS = 6
"""Settings that are beside the results."""


Runs = Mapping[str, Source]
"""Several runs by names that tell them apart, in the order in which they were named."""


def page_of_several(sources: Sequence[Source], wanted_loss: float | None = None) -> Page:
    """What there is to see of several runs; tokens, bytes and time are counted to the wanted validation loss, else to
    the lowest that all came to."""
    runs = dict(zip(_names(sources), sources, strict=True))
    differing = [
        name
        for name in dict.fromkeys(name for source in sources for name in source.settings)
        if not name.startswith(OF_PLACE) and len({as_typed(source.settings.get(name)) for source in sources}) > 1
    ]
    tables = [_results(runs, differing[:MAX_SETTINGS])]
    lowest = [losses.min() for source in sources if len(losses := source.history.best_validation[1])]
    if wanted_loss is None and len(lowest) == len(sources):
        wanted_loss = float(max(lowest))
    if wanted_loss is not None:
        tables.append(_costs(runs, wanted_loss))
    rows = [(name, *(as_typed(source.settings.get(name)) for source in sources)) for name in differing]
    tables.append(Table("Settings that differ", ("setting", *runs), rows))
    heat_map = _heat_map(runs, [name for name in differing if name != SEED])
    sections = [Section.of("Curves", _curves(runs)), Section.of("Results", [heat_map], tables)]
    problems = [f"{name}: {problem}" for name, source in runs.items() for problem in source.problems]
    told = [*_summary(runs, wanted_loss), *_identical(runs, differing), *_simulated(runs)]
    return Page(f"{len(runs)} runs", ", ".join(runs), sections, problems, sentences=told)


def _summary(runs: Runs, wanted_loss: float | None) -> Iterator[str]:
    """Which run came to the lowest loss, and how long all took to the wanted loss; None: there is none."""
    finals = {name: final for name, source in runs.items() if is_known(final := _final(source))}
    if len(finals) < 2:
        return
    best, worst = min(finals, key=finals.__getitem__), max(finals, key=finals.__getitem__)
    lowest, highest = finals[best], finals[worst]
    if lowest == highest:
        yield f"All came to a validation loss of {lowest:.4f}."
    else:
        yield f"{best} came to the lowest validation loss, {lowest:.4f}; {worst} to the highest, {highest:.4f}."
    if wanted_loss is None:
        return
    found = {name: cost["seconds"] for name, source in runs.items() if (cost := reached(source, wanted_loss))}
    times = [f"{name} {duration(found[name])}" for name in sorted(found, key=found.__getitem__)]
    if times:
        yield f"To a loss of {wanted_loss:.4f} they took: {', '.join(times)}."


def _identical(runs: Runs, differing: Sequence[str]) -> Iterator[str]:
    """Which runs have the same losses throughout, so that what of these settings differs between them did nothing."""
    alike: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for name, source in runs.items():
        losses = [*source.history.values("train_loss"), *source.history.values("validation_loss")]
        if known := tuple(loss for loss in losses if np.isfinite(loss)):
            alike[known].append(name)
    for names in alike.values():
        if len(names) > 1:
            of_runs = {tuple(as_typed(runs[name].settings.get(setting)) for setting in differing) for name in names}
            why = "the settings in which they differ did nothing" if len(of_runs) > 1 else "no setting differs"
            yield f"{', '.join(names)} are identical in every loss: {why}."


def _simulated(runs: Runs) -> Iterator[str]:
    """Whose seconds no clock on a wall has counted."""
    of_clock = [name for name, source in runs.items() if source.is_simulated]
    if of_clock:
        named = "all of them" if len(of_clock) == len(runs) else ", ".join(of_clock)
        yield f"Seconds are those of a simulated clock (simulation.*) in {named}."


def _names(sources: Sequence[Source]) -> list[str]:
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        names = [f"{source.directory.resolve().parent.name}/{source.name}" for source in sources]
    counts = itertools.count(1)
    return [name if names.count(name) == 1 else f"{name} ({next(counts)})" for name in names]


def _curves(runs: Runs) -> Iterator[Figure | None]:
    for column, y, title, caption in (
        ("validation_loss", "loss", "Validation loss", "Of the best of each run's trainers."),
        ("train_loss", "loss", "Training loss", "The lowest of each run's trainers."),
        ("total_batch", "sequences", "Total batch", "The largest of each run's trainers."),
        ("updates", "updates of a worker", "Updates of a round, H", "Between two outer steps."),
    ):
        name = "validation" if column == "validation_loss" else column
        chart = Chart(name, title, caption, y, is_stepped=y != "loss")
        curves: list[Curve] = []
        for run, source in runs.items():
            history = source.history
            of_rounds = (history.highest if chart.is_stepped else history.lowest)(history.values(column))
            curves.append(Curve(run, history.axes, of_rounds))
        yield curve_figure(chart, curves, "run")


def _final(source: Source) -> float | None:
    """The validation loss of the model that was saved, or else the last of the best trainer."""
    if saved := saved_candidate(source.result):
        return saved["validation_loss"]
    losses = source.history.best_validation[1]
    return float(losses[-1]) if len(losses) else None


def reached(source: Source, loss: float) -> dict[str, float] | None:
    """What had passed when a run's best trainer was first evaluated at this loss or below, by the names of AXES;
    None: it never was."""
    places, losses = source.history.best_validation
    places_below = np.flatnonzero(losses <= loss)
    if not len(places_below):
        return None
    return {name: float(values[places[places_below[0]]]) for name, values in source.history.axes.items()}


def _results(runs: Runs, keys: Sequence[str]) -> Table:
    """What runs came to, beside some of their settings."""
    first = _final(next(iter(runs.values())))
    rows = []
    for name, source in runs.items():
        final, losses = _final(source), source.history.best_validation[1]
        tokens, sent, seconds = (source.history.axes[axis][-1:].sum() for axis in ("tokens", "bytes", "seconds"))
        rows.append(
            (
                name,
                *(as_typed(source.settings.get(key)) for key in keys),
                loss_in_words(final),
                f"{final - first:+.4f}" if final is not None and first is not None else UNKNOWN,
                loss_in_words(min(losses, default=None)),
                f"{source.history.num_rounds:,}",
                f"{tokens:,.0f}",
                in_bytes(sent),
                duration(seconds),
                source.state,
            )
        )
    figures = ("final loss", "to the first", "lowest while training", "rounds", "tokens", "sent", "time", "state")
    return Table("What runs came to", ("run", *keys, *figures), rows)


def _costs(runs: Runs, loss: float) -> Table:
    costs = {name: reached(source, loss) for name, source in runs.items()}
    first = next(iter(costs.values()))
    rows = []
    for name, cost in costs.items():
        if cost is None:
            rows.append((name, "not reached", "", "", ""))
        else:
            seconds = cost["seconds"]
            ratio = f"{seconds / first['seconds']:.3f}" if first and first["seconds"] else ""
            rows.append((name, f"{cost['tokens']:,.0f}", in_bytes(cost["bytes"]), duration(seconds), ratio))
    head = ("run", "tokens", "bytes", "time", "time, over the first's")
    return Table(f"What it took to a validation loss of {loss:.4f}", head, rows)


def _heat_map(runs: Runs, keys: Sequence[str]) -> Figure | None:
    """The final loss by two settings that were swept, a mean over seeds; None: not two were, or it is not known."""
    if len(keys) != 2:
        return None
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for source in runs.values():
        final = _final(source)
        if is_known(final):
            cells[as_typed(source.settings.get(keys[0])), as_typed(source.settings.get(keys[1]))].append(final)
    if not cells:
        return None
    firsts, seconds = (sorted(set(values), key=_ascending) for values in zip(*cells, strict=True))
    if len(cells) < len(firsts) * len(seconds) / 2:  # the two were changed together, not one by the other
        return None
    means = [float(f"{np.mean(losses):.5g}") for losses in cells.values()]
    drawn: list[Point] = [
        {"first": first, "second": second, "loss": mean, "runs": len(losses)}
        for ((first, second), losses), mean in zip(cells.items(), means, strict=True)
    ]
    base = new_chart(max(90, CELL * len(seconds))).encode(
        x=alt.X("first:N", title=keys[0], axis=alt.Axis(labelAngle=0), sort=firsts),
        y=alt.Y("second:N", title=keys[1], sort=seconds),
        tooltip=["first:N", "second:N", "loss:Q", "runs:Q"],
    )
    map_ = base.mark_rect().encode(color=alt.Color("loss:Q", title="loss", scale=alt.Scale(scheme="viridis")))
    is_dark = f"luminance(scale('color', datum.loss)) < {DARK}"
    shade = alt.condition(is_dark, alt.value("white"), alt.value("black"))
    text = base.mark_text(fontWeight="bold").encode(text=alt.Text("loss:Q", format=".3f"), color=shade)
    caption = "Final validation loss; where runs differ in seeds, too, a mean over them."
    return Figure("heat_map", f"{keys[0]} and {keys[1]}", caption, alt.layer(map_, text), drawn)


def _ascending(value: str) -> tuple[bool, float, str]:
    """Sort numbers by size, before all else."""
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, value
