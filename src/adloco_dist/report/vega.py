"""Vega, which draws: pictures, and the library for pages. Each takes a core for long, and never lets a thread go on."""

from functools import cache
from typing import Any

import vl_convert

PNG_SCALE = 1.5
"""Pixels of a picture's file for each of its own."""


def picture(specification: dict[str, Any]) -> bytes:
    """A figure in Vega-Lite, with its points, as a PNG file."""
    return vl_convert.vegalite_to_png(specification, scale=PNG_SCALE)


@cache
def vega_script() -> str:
    """The library as a script that cannot end the element that it stands in."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
