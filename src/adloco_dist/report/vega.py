"""Vega, which draws: pictures, and the library for pages. Each takes a core for long, and never lets a thread go on."""

import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vl_convert

from adloco_dist.run.manifest import write_content

PNG_SCALE = 1.5
"""Pixels of a picture's file for each of its own."""


def picture(specification: dict[str, Any]) -> bytes:
    """A figure in Vega-Lite, with its points, as a PNG file."""
    return vl_convert.vegalite_to_png(specification, scale=PNG_SCALE)


@cache
def vega_script() -> str:
    """The library as a script that cannot end the element that it stands in. It is put together once for each of its
    releases, which takes seconds, and kept in the user's cache where that can be written."""
    path = None
    with suppress(OSError, UnicodeDecodeError, RuntimeError):  # the last: this user has no home
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        path = cache_folder / "adloco_dist" / f"vega-{version('vl-convert-python')}.js"
        return path.read_text(encoding="utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    if path:
        with suppress(OSError):
            write_content(path, script.encode())
    return script
