"""A figure: how it is drawn (Vega-Lite, by Altair), and its points apart, so that a live page can renew them.

Long curves are cut down to what a picture can show, without losing an extreme.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np

from adloco_dist.report.columns import Numbers, Values
from adloco_dist.report.history import AXES

ROWS = "rows"
"""The name of the points in a specification."""
WIDTH, HEIGHT = 460, 220
"""Pixels of a picture; on a page, a figure is as wide as what it stands in."""
LETTER = 7
"""Pixels of a letter in a legend."""
LOG_PADDING = 8
"""Pixels between a curve and the edge, where no round number is the edge."""
FAINT, HIDDEN = 0.35, 0.05
"""Opacity of curves that stand back, and of those that the legend has others chosen over."""
POINTER = 200
"""Square pixels around a value in which the pointer finds it."""
CONFIG = {"view": {"strokeWidth": 0}, "axis": {"gridColor": "#e6e6e6", "domainColor": "#999"}}
"""Colours of a picture; a page has its own."""
STRETCHES = 150
"""Parts of a curve, each of which is drawn with its first and last, lowest and highest value."""
DIGITS = 6
"""Significant digits of what is drawn."""
LABEL = "abs(datum.value) >= 10000 ? format(datum.value, '~s') : format(datum.value, '~g')"
"""How numbers of an axis are written."""
Point = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Figure:
    """A picture with its points. Where its x is "round", a page may draw it against any of AXES."""

    name: str
    """Name of its file."""
    title: str
    caption: str
    layers: alt.Chart | alt.LayerChart | alt.FacetChart
    points: Sequence[Point]
    picture_width: int | None = None
    """Pixels of its picture where that is wider than others, and the whole width of a page; None: it is not."""
    smoothed: str | None = None
    """The values that a page may smooth, by their name in the points; None: none."""
    pointer: alt.Chart | None = None
    """What a page's pointer finds of curves. It is not seen, and would take half of a picture's time."""

    def specification(self) -> dict[str, Any]:
        """The figure in Vega-Lite, without its points; as wide as what it stands in."""
        layers = alt.layer(self.layers, self.pointer) if self.pointer else self.layers
        return {**layers.to_dict(validate=False), "width": "container"}

    def picture(self) -> dict[str, Any]:
        """The figure in Vega-Lite, with its points and its title, as a picture of its own."""
        of_picture = {"width": self.picture_width or WIDTH, "datasets": {ROWS: self.points}, "title": self.title}
        drawn = {**self.layers.to_dict(validate=False), **of_picture}
        return {**drawn, "config": {**drawn["config"], **CONFIG}}


@dataclass(frozen=True)
class Chart:
    """Curves over the rounds: what they show, and how they are drawn."""

    name: str
    """Name of its file."""
    title: str
    caption: str
    y: str
    """What the values are called, in the points and at the axis."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Fields of the rows, by what tells the curves of a series apart; empty: the one that is called like the chart."""
    faint: str = ""
    """Which of the curves of a series stand back. (Dashes take ten times as long to draw.)"""
    is_log: bool = False
    is_stepped: bool = False


@dataclass(frozen=True)
class Curve:
    """A number over the rounds of a run."""

    series: str
    axes: Mapping[str, Values]
    """For every round, what has passed at its end, by the names of AXES."""
    values: Values
    places: Values | Numbers | None = None
    """For every value, the place of its round in the history, or a place between two; None: a value for each round."""
    kind: str = ""
    """Which of several curves of the series it is."""

    def points(self, y: str) -> list[Point]:
        """The points to draw, with the values under the name `y`; time within a round is taken to pass evenly."""
        chosen = kept(self.values)
        where = chosen if self.places is None else self.places[chosen]
        columns = {
            axis: np.interp(where, np.arange(-1, len(ends)), np.concatenate([[0.0], ends]))
            for axis, ends in self.axes.items()
        }
        fixed = {"series": self.series, "kind": self.kind} if self.kind else {"series": self.series}
        columns[y] = self.values[chosen]
        rows = zip(*map(rounded, columns.values()), strict=True)
        return [{**fixed, **dict(zip(columns, row, strict=True))} for row in rows]


def kept(values: Values) -> Numbers:
    """Which of the values are drawn, in ascending order: all of a short curve, four of every stretch of a long one."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= 4 * STRETCHES:
        return known
    chosen = []
    for stretch in np.array_split(known, STRETCHES):
        inside = values[stretch]
        chosen.append(stretch[[0, int(inside.argmin()), int(inside.argmax()), -1]])
    return np.unique(np.concatenate(chosen))


def rounded(values: Values) -> list[float | int]:
    """Plain numbers with as many digits as a picture can show; whole ones are whole."""
    return [int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def new_chart(height: int = HEIGHT) -> alt.Chart:
    """A chart of a figure's points, which are added later, so many pixels high."""
    return alt.Chart(alt.NamedData(ROWS), height=height)


def curve_figure(chart: Chart, curves: Sequence[Curve], series: str = "trainer") -> Figure | None:
    """Curves over the rounds, with what they are under the pointer; None: there is nothing to draw.

    Args:
        curves: all of them, also those without points: figures with the same series have the same colours.
        series: what tells curves apart, as the legend calls it.
    """
    drawn = [point for curve in curves for point in curve.points(chart.y)]
    if chart.is_log:
        drawn = [point for point in drawn if isinstance(value := point[chart.y], int | float) and value > 0]
    if not drawn:
        return None
    names = list(dict.fromkeys(curve.series for curve in curves))
    kinds = list(chart.columns) if len(chart.columns) > 1 else []
    scale = alt.Scale(type="log", nice=False, padding=LOG_PADDING) if chart.is_log else alt.Scale(zero=False)
    base = new_chart().encode(
        x=over_rounds(),
        y=alt.Y(chart.y, type="quantitative", title=chart.y, scale=scale, axis=alt.Axis(labelExpr=LABEL)),
        color=color(names, series),
        tooltip=[
            *tips("series:N", *(["kind:N"] if kinds else []), "round:Q"),
            alt.Tooltip(chart.y, type="quantitative"),
        ],
    )
    interpolate = "step-after" if chart.is_stepped else "linear"
    line = base.mark_line(strokeWidth=1.5, strokeCap="round", interpolate=interpolate)  # a lone value is a dot
    opacity: alt.Opacity | float = 1.0
    if kinds:
        opacities = alt.Scale(domain=kinds, range=[FAINT if kind == chart.faint else 1.0 for kind in kinds])
        legend = alt.Legend(orient="bottom", symbolType="stroke", symbolStrokeWidth=3)
        opacity = alt.Opacity("kind:O", title=None, scale=opacities, legend=legend)
    # With the wheel alone one scrolls over the figures of a page.
    zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]")
    line = choosable(line, {"series": names, "kind": kinds}, opacity)
    pointer = base.mark_point(opacity=0, size=POINTER)
    smoothed = None if chart.is_stepped else chart.y
    layers = line.add_params(zoom)
    return Figure(chart.name, chart.title, chart.caption, layers, drawn, smoothed=smoothed, pointer=pointer)


def tips(*fields: str) -> list[alt.Tooltip]:
    """What stands under the pointer. (Altair takes ten milliseconds for each that is text alone.)"""
    return [alt.Tooltip(field) for field in fields]


def choosable(chart: alt.Chart, choices: Mapping[str, Sequence[str]], opacity: alt.Opacity | float) -> alt.Chart:
    """A chart of which a click in a legend leaves one of several.

    Args:
        choices: what there is to choose from, by what tells it apart in the points.
        opacity: of what is not hidden.
    """
    shown = opacity if isinstance(opacity, alt.Opacity) else alt.value(opacity)
    chosen = [
        alt.selection_point(name=f"chosen_{field}", fields=[field], bind="legend")
        for field, names in choices.items()
        if len(names) > 1
    ]
    if not chosen:
        return chart.encode(opacity=shown)
    both = functools.reduce(operator.and_, chosen)
    return chart.encode(opacity=alt.condition(both, shown, alt.value(HIDDEN))).add_params(*chosen)


def over_rounds() -> alt.X:
    """The axis that a page can change."""
    axis = alt.Axis(format="~s", tickMinStep=1)
    return alt.X("round", type="quantitative", title=AXES["round"], axis=axis, scale=alt.Scale(nice=False))


def color(names: Sequence[str], title: str, is_filled: bool = False) -> alt.Color:
    """Colours of series, the same in all figures that have the same series; of areas and bars, or of lines."""
    scheme = "tableau10" if len(names) <= 10 else "tableau20"
    columns = max(1, min(4, WIDTH // (LETTER * max(map(len, names)) + 50)))
    legend = alt.Legend(
        orient="bottom",
        columns=columns,
        symbolLimit=40,
        labelLimit=WIDTH // columns - 30,
        symbolType="square" if is_filled else "stroke",
        symbolStrokeWidth=0 if is_filled else 3,
        symbolOpacity=1,  # not that of curves which stand back
    )
    legend = legend if len(names) > 1 else None
    return alt.Color("series:N", title=title, scale=alt.Scale(domain=list(names), scheme=scheme), legend=legend)
