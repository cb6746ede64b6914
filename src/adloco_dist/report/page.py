"""A page of figures, tables and sentences, as one HTML file that needs neither a network nor a server."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from adloco_dist.report.figures import Figure
from adloco_dist.report.history import AXES

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("adloco_dist.report", ""),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


@dataclass(frozen=True)
class Table:
    """Rows of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_folded: bool = False
    """Whether it is shown on request."""


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    @classmethod
    def of(cls, title: str, figures: Iterable[Figure | None], tables: Iterable[Table] = ()) -> "Section":
        """What there is to show: figures that have something to draw, tables that have rows."""
        return cls(title, [figure for figure in figures if figure], [table for table in tables if table.rows])


@dataclass(frozen=True)
class Page:
    """What is on a page, from top to bottom. All text may come from outside, and is shown as text."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    tiles: Sequence[tuple[str, str]] = ()
    sentences: Sequence[str] = ()

    @property
    def figures(self) -> list[Figure]:
        """All figures, from top to bottom."""
        return [figure for section in self.sections for figure in section.figures]

    def content(self) -> str:
        """The page without its figures' points, as HTML."""
        return TEMPLATES.get_template("content.html").render(axes=AXES, **vars(self))

    def html(self, vega: str | None) -> str:
        """The whole page, with the library that draws; None: a live one, which fetches `state` and `vega.js` from where
        it came, instead of holding all."""
        script = (resources.files("adloco_dist.report") / "page.js").read_text(encoding="utf-8")
        data = json.dumps(self.data(), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        template = TEMPLATES.get_template("page.html")
        return template.render(axes=AXES, is_live=vega is None, vega=vega, script=script, data=data, **vars(self))

    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        figures = [
            {
                "name": figure.name,
                "specification": figure.specification(),
                "points": figure.points,
                "smoothed": figure.smoothed,
            }
            for figure in self.figures
        ]
        return {"axes": AXES, "figures": figures}
