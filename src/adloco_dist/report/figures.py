"""A figure: how it is drawn (Vega-Lite, by Altair), and its points apart, so that a live page can renew them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

from adloco_dist.report.history import AXES, History, Values
from adloco_dist.report.sampling import Point, points

ROWS = "rows"
"""The name of the points in a specification."""
WIDTH, HEIGHT = 460, 220
PNG_SCALE = 1.5
LETTER = 7
"""Pixels of a letter in a legend."""
LOG_PADDING = 8
"""Pixels between a curve and the edge, where no round number is the edge."""
MAX_LINES = 12
"""Curves of ranks in one figure; of more, the highest, the median and the lowest are drawn."""
LABEL = "abs(datum.value) >= 10000 ? format(datum.value, '~s') : format(datum.value, '~g')"
"""How numbers of an axis are written."""
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


Figures = Iterable[Figure | None]
"""None: there is nothing to draw."""


@dataclass(frozen=True)
class Curve:
    """A number over the rounds, in one row for each of some rows of the history."""

    series: str
    values: Values
    rows: Any
    """Where in the history the values are."""
    kind: str = ""
    """Which of several curves of the series it is."""


def drawable(figures: Figures) -> list[Figure]:
    """Those that there is something to draw of."""
    return [figure for figure in figures if figure]


def curves(history: History, name: str, found: Sequence[Curve]) -> list[Point]:
    """The points of several curves."""
    drawn: list[Point] = []
    for curve in found:
        of_curve = points(history.axes, history.places[curve.rows], curve.values, name, curve.series)
        drawn += [{**point, "kind": curve.kind} for point in of_curve] if curve.kind else of_curve
    return drawn


def trainer_names(history: History) -> list[str]:
    """What the curves of trainers are called."""
    return [f"trainer {trainer}" for trainer in history.trainers]


def by_trainer(history: History, *path: str, kind: str = "") -> list[Curve]:
    """A number of every trainer's rows."""
    values = history.values(*path)
    return [
        Curve(f"trainer {trainer}", values[rows], rows, kind)
        for trainer in history.trainers
        if len(rows := history.rows_of(trainer))
    ]


def line_figure(
    name: str, title: str, caption: str, y: str, drawn: Sequence[Point], *, series: str = "trainer",
    names: Sequence[str] = (), is_log: bool = False, is_stepped: bool = False,
    kinds: Mapping[str, float] | None = None,
) -> Figure | None:  # fmt: skip
    """Curves over the rounds, with what they are under the pointer; None: there is nothing to draw.

    Args:
        y: the name of the values in the points; the axis is called so.
        series: what tells curves apart, as the legend calls it.
        names: all that there are of these in other figures, so that colours are the same; empty: those that are drawn.
        kinds: opacities of curves of a series that are of several kinds. (Dashes take ten times as long to draw.)
    """
    if not drawn:
        return None
    names = names or list(dict.fromkeys(str(point["series"]) for point in drawn))
    scale = alt.Scale(type="log", nice=False, padding=LOG_PADDING) if is_log else alt.Scale(zero=False)
    base = alt.Chart(alt.NamedData(ROWS)).encode(
        x=over_rounds(),
        y=alt.Y(y, type="quantitative", title=y, scale=scale, axis=alt.Axis(labelExpr=LABEL)),
        color=color(names, series),
        tooltip=["series:N", *(["kind:N"] if kinds else []), "round:Q", alt.Tooltip(y, type="quantitative")],
    )
    interpolate = "step-after" if is_stepped else "linear"
    line = base.mark_line(strokeWidth=1.5, strokeCap="round", interpolate=interpolate)  # a lone value is a dot
    if kinds:
        opacities = alt.Scale(domain=list(kinds), range=list(kinds.values()))
        legend = alt.Legend(orient="bottom", symbolType="stroke", symbolStrokeWidth=3)
        line = line.encode(opacity=alt.Opacity("kind:O", title=None, scale=opacities, legend=legend))
    return Figure(name, title, caption, line.properties(**size()), drawn, base.mark_point(opacity=0, size=50))


def over_rounds(start: str = "round") -> alt.X:
    """The axis that a page can change."""
    return alt.X(
        start,
        type="quantitative",
        title=AXES["round"],
        axis=alt.Axis(format="~s", tickMinStep=1),
        scale=alt.Scale(nice=False),
    )


def color(names: Sequence[str], title: str) -> alt.Color:
    """Colours of series, the same in all figures that have the same series."""
    scheme = "tableau10" if len(names) <= 10 else "tableau20"
    columns = max(1, min(4, WIDTH // (LETTER * max(map(len, names)) + 50)))
    legend = alt.Legend(
        orient="bottom", columns=columns, symbolLimit=40, labelLimit=WIDTH // columns - 30, symbolType="stroke",
        symbolStrokeWidth=3,
    )  # fmt: skip
    legend = legend if len(names) > 1 else None
    return alt.Color("series:N", title=title, scale=alt.Scale(domain=list(names), scheme=scheme), legend=legend)


def _plain(layers: Layers) -> dict[str, Any]:
    chart = layers.configure_view(strokeWidth=0).configure_axis(gridColor="#e6e6e6", domainColor="#999")
    return chart.to_dict(validate=False)


def size(height: int = HEIGHT) -> dict[str, int]:
    """Width and height of a figure, in pixels."""
    return {"width": WIDTH, "height": height}
