"""A figure: how it is drawn (Vega-Lite, by Altair), and its points apart, so that a live page can renew them.

Long curves are cut down to what a picture can show, without losing an extreme.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from adloco_dist.report.history import AXES, Numbers, Values

ROWS = "rows"
"""The name of the points in a specification."""
WIDTH, HEIGHT = 460, 220
PNG_SCALE = 1.5
LETTER = 7
"""Pixels of a letter in a legend."""
LOG_PADDING = 8
"""Pixels between a curve and the edge, where no round number is the edge."""
FAINT = 0.35
"""Opacity of curves that stand back."""
STRETCHES = 150
"""Parts of a curve, each of which is drawn with its first and last, lowest and highest value."""
DIGITS = 6
"""Significant digits of what is drawn."""
LABEL = "abs(datum.value) >= 10000 ? format(datum.value, '~s') : format(datum.value, '~g')"
"""How numbers of an axis are written."""
Point = dict[str, float | int | str | None]
Layers = alt.Chart | alt.LayerChart | alt.FacetChart


@dataclass(frozen=True)
class Figure:
    """A picture with its points. Where its x is "round", a page may draw it against any of AXES."""

    name: str
    """Name of its file."""
    title: str
    caption: str
    layers: Layers
    points: Sequence[Point]
    under_pointer: alt.Chart | None = None
    """A layer that is not seen, but says what is under the pointer."""
    is_wide: bool = False
    """Whether it takes the whole width of a page."""

    def specification(self) -> dict[str, Any]:
        """The figure of a page in Vega-Lite, without its points."""
        return _plain(alt.layer(self.layers, self.under_pointer) if self.under_pointer else self.layers)

    def png(self) -> bytes:
        """The figure as a picture."""
        specification = {**_plain(self.layers), "datasets": {ROWS: self.points}, "title": self.title}
        return vl_convert.vegalite_to_png(specification, scale=PNG_SCALE)


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
    """A number over the rounds."""

    series: str
    values: Values
    places: Values | Numbers
    """For every value, the place of its round in the history, or a place between two rounds."""
    kind: str = ""
    """Which of several curves of the series it is."""


def curve_points(axes: Mapping[str, Values], curves: Iterable[Curve], y: str) -> list[Point]:
    """The points of curves, whose values are called `y`, against `axes`, which have what has passed at the end of every
    round; within a round it is taken to pass evenly.
    """
    drawn: list[Point] = []
    for curve in curves:
        chosen = kept(curve.values)
        where = curve.places[chosen]
        columns = {
            axis: np.interp(where, np.arange(-1, len(ends)), np.concatenate([[0.0], ends]))
            for axis, ends in axes.items()
        }
        fixed = {"series": curve.series, "kind": curve.kind} if curve.kind else {"series": curve.series}
        drawn += points(fixed, {**columns, y: curve.values[chosen]})
    return drawn


def points(fixed: Mapping[str, str], columns: Mapping[str, Values]) -> list[Point]:
    """A point for each row of some columns."""
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


def curve_figure(
    chart: Chart, drawn: Sequence[Point], series: str = "trainer", names: Sequence[str] = ()
) -> Figure | None:
    """Curves over the rounds, with what they are under the pointer; None: there is nothing to draw.

    Args:
        series: what tells curves apart, as the legend calls it.
        names: all series that there are in other figures, so that colours are the same; empty: those that are drawn.
    """
    if chart.is_log:
        drawn = [point for point in drawn if isinstance(value := point[chart.y], int | float) and value > 0]
    if not drawn:
        return None
    names = names or list(dict.fromkeys(str(point["series"]) for point in drawn))
    kinds = list(chart.columns) if len(chart.columns) > 1 else []
    scale = alt.Scale(type="log", nice=False, padding=LOG_PADDING) if chart.is_log else alt.Scale(zero=False)
    base = alt.Chart(alt.NamedData(ROWS)).encode(
        x=over_rounds(),
        y=alt.Y(chart.y, type="quantitative", title=chart.y, scale=scale, axis=alt.Axis(labelExpr=LABEL)),
        color=color(names, series),
        tooltip=["series:N", *(["kind:N"] if kinds else []), "round:Q", alt.Tooltip(chart.y, type="quantitative")],
    )
    interpolate = "step-after" if chart.is_stepped else "linear"
    line = base.mark_line(strokeWidth=1.5, strokeCap="round", interpolate=interpolate)  # a lone value is a dot
    if kinds:
        opacities = alt.Scale(domain=kinds, range=[FAINT if kind == chart.faint else 1.0 for kind in kinds])
        legend = alt.Legend(orient="bottom", symbolType="stroke", symbolStrokeWidth=3)
        line = line.encode(opacity=alt.Opacity("kind:O", title=None, scale=opacities, legend=legend))
    under_pointer = base.mark_point(opacity=0, size=50)
    return Figure(chart.name, chart.title, chart.caption, line.properties(**size()), drawn, under_pointer)


def over_rounds() -> alt.X:
    """The axis that a page can change."""
    axis = alt.Axis(format="~s", tickMinStep=1)
    return alt.X("round", type="quantitative", title=AXES["round"], axis=axis, scale=alt.Scale(nice=False))


def color(names: Sequence[str], title: str) -> alt.Color:
    """Colours of series, the same in all figures that have the same series."""
    scheme = "tableau10" if len(names) <= 10 else "tableau20"
    columns = max(1, min(4, WIDTH // (LETTER * max(map(len, names)) + 50)))
    legend = alt.Legend(
        orient="bottom",
        columns=columns,
        symbolLimit=40,
        labelLimit=WIDTH // columns - 30,
        symbolType="stroke",
        symbolStrokeWidth=3,
    )
    legend = legend if len(names) > 1 else None
    return alt.Color("series:N", title=title, scale=alt.Scale(domain=list(names), scheme=scheme), legend=legend)


def _plain(layers: Layers) -> dict[str, Any]:
    chart = layers.configure_view(strokeWidth=0).configure_axis(gridColor="#e6e6e6", domainColor="#999")
    return chart.to_dict(validate=False)


def size(height: int = HEIGHT) -> dict[str, int]:
    """Width and height of a figure, in pixels."""
    return {"width": WIDTH, "height": height}
