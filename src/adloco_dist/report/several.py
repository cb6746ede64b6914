"""The page of several runs: their curves together, what they came to, and what it took them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import altair as alt
import numpy as np

from adloco_dist.report.figures import ROWS, Figure, Figures, drawable, line_figure, size
from adloco_dist.report.history import History, Values
from adloco_dist.report.one import shown
from adloco_dist.report.page import Page, Section, Table
from adloco_dist.report.sampling import Point, points
from adloco_dist.report.source import Source
from adloco_dist.text import duration, in_bytes

OF_PLACE = ("run.", "tracking.")
"""Settings that say where a run is, not what it is."""
SEED = "seed"
CELL = 44
"""Pixels of a cell of the heat map."""


@dataclass(frozen=True)
class Reached:
    """What had passed when a run had come to a loss."""

    tokens: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Runs:
    """Several runs, in the order in which they were named."""

    names: Sequence[str]
    sources: Sequence[Source]

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "Runs":
        """Runs with names that tell them apart."""
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            names = [f"{source.directory.resolve().parent.name}/{source.name}" for source in sources]
        counts = itertools.count(1)
        return cls([name if names.count(name) == 1 else f"{name} ({next(counts)})" for name in names], sources)

    @property
    def differing(self) -> list[str]:
        """The settings that are not the same in all."""
        names = dict.fromkeys(name for source in self.sources for name in source.settings)
        return [
            name
            for name in names
            if not name.startswith(OF_PLACE) and len({shown(one.settings.get(name)) for one in self.sources}) > 1
        ]

    def common_loss(self) -> float | None:
        """The lowest validation loss that every run came to while training; None: not all were evaluated."""
        lowest = [losses[1].min() for losses in map(_validation, self.sources) if len(losses[1])]
        return float(max(lowest)) if len(lowest) == len(self.sources) else None


def page_of_several(runs: Runs, wanted_loss: float | None = None) -> Page:
    """What there is to see of several runs.

    Args:
        wanted_loss: the validation loss to which tokens, bytes and time are counted; None: the lowest that all came to.
    """
    loss = runs.common_loss() if wanted_loss is None else wanted_loss
    tables = [_results(runs), *([_costs(runs, loss)] if loss is not None else []), *_settings(runs)]
    problems = [
        f"{name}: {one}" for name, source in zip(runs.names, runs.sources, strict=True) for one in source.problems
    ]
    sections = [Section("Curves", drawable(_curves(runs))), Section("Results", drawable([_heat_map(runs)]), tables)]
    title, subtitle = f"{len(runs.sources)} runs", ", ".join(runs.names)
    return Page(title, subtitle, sections, problems)


def _curves(runs: Runs) -> Figures:
    found = {name: _validation(source) for name, source in zip(runs.names, runs.sources, strict=True)}
    axes = {name: source.history.axes for name, source in zip(runs.names, runs.sources, strict=True)}
    curves = [
        point for name, (places, losses) in found.items() for point in points(axes[name], places, losses, "loss", name)
    ]
    yield line_figure(
        "validation", "Validation loss", "Of the best of each run's trainers.", "loss", curves, series="run",
        names=runs.names,
    )  # fmt: skip
    for field, y, title, caption, is_stepped in (
        ("train_loss", "loss", "Training loss", "The lowest of each run's trainers.", False),
        ("total_batch", "sequences", "Total batch", "The largest of each run's trainers.", True),
        ("updates", "updates of a worker", "Updates of a round, H", "Between two outer steps.", True),
    ):
        pooled: list[Point] = []
        for name, source in zip(runs.names, runs.sources, strict=True):
            history = source.history
            values = history.values(field)
            of_round = -history.highest(-values) if field == "train_loss" else history.highest(values)
            pooled += points(history.axes, np.arange(len(of_round)), of_round, y, name)
        yield line_figure(field, title, caption, y, pooled, series="run", names=runs.names, is_stepped=is_stepped)


def _validation(source: Source) -> tuple[np.ndarray, Values]:
    """The validation loss of the best trainer, where any was evaluated: the rounds' places, and the losses."""
    lowest = _lowest(source.history)
    places = np.flatnonzero(np.isfinite(lowest))
    return places, lowest[places]


def _lowest(history: History) -> Values:
    return -history.highest(-history.values("validation_loss"))


def _final(source: Source) -> float | None:
    """The validation loss of the model that was saved, or else the last of the best trainer."""
    if result := source.result:
        for candidate in result["candidates"]:
            if candidate["name"] == result["saved"]:
                return candidate["validation_loss"]
    losses = _validation(source)[1]
    return float(losses[-1]) if len(losses) else None


def reached(source: Source, loss: float) -> Reached | None:
    """What had passed when a run's best trainer was first evaluated at this loss or below; None: it never was."""
    places, losses = _validation(source)
    found = np.flatnonzero(losses <= loss)
    if not len(found):
        return None
    axes, place = source.history.axes, places[found[0]]
    return Reached(*(float(axes[name][place]) for name in ("tokens", "bytes", "seconds")))


def _results(runs: Runs) -> Table:
    first = _final(runs.sources[0])
    rows = []
    for name, source in zip(runs.names, runs.sources, strict=True):
        final, losses, axes = _final(source), _validation(source)[1], source.history.axes
        difference = f"{final - first:+.4f}" if final is not None and first is not None else "unknown"
        last = {axis: float(values[-1]) if len(values) else 0.0 for axis, values in axes.items()}
        rows.append((
            name, *(shown(source.settings.get(key)) for key in runs.differing[:6]), _loss(final), difference,
            _loss(float(losses.min()) if len(losses) else None), f"{source.history.num_rounds:,}",
            f"{last['tokens']:,.0f}", in_bytes(last["bytes"]), duration(last["seconds"]), source.state,
        ))  # fmt: skip
    head = (
        "run", *runs.differing[:6], "final loss", "to the first", "lowest while training", "rounds", "tokens", "sent",
        "time", "state",
    )  # fmt: skip
    return Table("What runs came to", head, rows)


def _costs(runs: Runs, loss: float) -> Table:
    found = [reached(source, loss) for source in runs.sources]
    first, rows = found[0], []
    for name, cost in zip(runs.names, found, strict=True):
        if cost is None:
            rows.append((name, "not reached", "", "", ""))
        else:
            ratio = f"{cost.seconds / first.seconds:.3f}" if first and first.seconds else ""
            rows.append((name, f"{cost.tokens:,.0f}", in_bytes(cost.bytes), duration(cost.seconds), ratio))
    head = ("run", "tokens", "bytes", "time", "time, over the first's")
    return Table(f"What it took to a validation loss of {loss:.4f}", head, rows)


def _settings(runs: Runs) -> list[Table]:
    rows = [(name, *(shown(one.settings.get(name)) for one in runs.sources)) for name in runs.differing]
    return [Table("Settings that differ", ("setting", *runs.names), rows)] if rows else []


def _heat_map(runs: Runs) -> Figure | None:
    """The final loss by two settings that were swept, a mean over seeds; None: not two were, or it is not known."""
    keys = [name for name in runs.differing if name != SEED]
    if len(keys) != 2:
        return None
    cells: dict[tuple[str, str], list[float]] = {}
    for source in runs.sources:
        final = _final(source)
        if final is not None and math.isfinite(final):
            cells.setdefault((shown(source.settings.get(keys[0])), shown(source.settings.get(keys[1]))), []).append(
                final
            )
    if not cells:
        return None
    found: list[Point] = [
        {"first": first, "second": second, "loss": float(f"{np.mean(losses):.5g}"), "runs": len(losses)}
        for (first, second), losses in cells.items()
    ]
    base = alt.Chart(alt.NamedData(ROWS)).encode(
        x=alt.X(
            "first:N",
            title=keys[0],
            axis=alt.Axis(labelAngle=0),
            sort=_ascending(str(point["first"]) for point in found),
        ),
        y=alt.Y("second:N", title=keys[1], sort=_ascending(str(point["second"]) for point in found)),
        tooltip=["first:N", "second:N", "loss:Q", "runs:Q"],
    )
    map_ = base.mark_rect().encode(color=alt.Color("loss:Q", title="loss", scale=alt.Scale(scheme="viridis")))
    text = base.mark_text(color="white", fontWeight="bold").encode(text=alt.Text("loss:Q", format=".3f"))
    rows = len({point["second"] for point in found})
    layers = alt.layer(map_, text).properties(**size(max(90, CELL * rows)))
    caption = "Final validation loss; where runs differ in seeds, too, a mean over them."
    return Figure("heat_map", f"{keys[0]} and {keys[1]}", caption, layers, found)


def _ascending(values: Iterator[str]) -> list[str]:
    """Different values: numbers by size, before all else."""

    def order(value: str) -> tuple[bool, float, str]:
        try:
            return False, float(value), ""
        except ValueError:
            return True, 0.0, value

    return sorted(set(values), key=order)


def _loss(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.4f}"
