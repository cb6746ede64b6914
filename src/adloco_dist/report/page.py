"""A page of figures, tables and sentences, as one HTML file that needs neither a network nor a server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from adloco_dist.report.figures import Figure
from adloco_dist.report.history import AXES

HTML_FILE, FIGURES_FOLDER = "report.html", "figures"


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


@dataclass(frozen=True)
class Page:
    """What is on a page, from top to bottom. All text may come from outside, and is shown as text."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    tiles: Sequence[tuple[str, str]] = ()
    sentences: Sequence[str] = field(default=())

    @property
    def figures(self) -> list[Figure]:
        """All figures, from top to bottom."""
        return [figure for section in self.sections for figure in section.figures]

    def content(self) -> str:
        """The page without its figures' points, as HTML."""
        return _templates().get_template("content.html").render(axes=AXES, **vars(self))

    def html(self, is_live: bool = False) -> str:
        """The whole page.

        Args:
            is_live: it fetches `state` and `vega.js` from where it came, instead of holding all.
        """
        script = (resources.files("adloco_dist.report") / "page.js").read_text(encoding="utf-8")
        vega = "" if is_live else vega_script()
        page = _templates().get_template("page.html")
        return page.render(
            axes=AXES, is_live=is_live, vega=vega, script=script, data=_within_script(self.data()), **vars(self)
        )

    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {"axes": AXES, "figures": [_plain(figure) for figure in self.figures]}

    def write(self, folder: Path) -> Path:
        """Write the page, and every figure as a picture beside it; return the page's path.

        Raises:
            OSError: something cannot be written.
        """
        pictures = folder / FIGURES_FOLDER
        pictures.mkdir(parents=True, exist_ok=True)
        for figure in self.figures:
            (pictures / f"{figure.name}.png").write_bytes(figure.png())
        path = folder / HTML_FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.html(), encoding="utf-8")
        temporary.replace(path)
        return path


@cache
def vega_script() -> str:
    """The library that draws, which takes a second to put together."""
    return _within_element(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("adloco_dist.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip


def _plain(figure: Figure) -> dict[str, Any]:
    return {"name": figure.name, "specification": figure.specification(), "points": figure.points}


def _within_script(value: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _within_element(script: str) -> str:
    """A script that cannot end the element that it stands in."""
    return script.replace("</script", "<\\/script")
