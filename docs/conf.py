"""The documentation as a site: `make site` builds it from the pages as they are in the checkout."""

import re
from pathlib import Path
from posixpath import normpath

from sphinx.application import Sphinx

from adloco_dist import __version__

project = "adloco_dist"
release = version = __version__
root_doc = "README"
INDEX = "docs/README"
"""The page that lists all others."""
# The source folder is the whole checkout: pages link to each other, and to files, as they do in an editor.
include_patterns = ["*.md", "docs/**.md", "docker/*.md", "examples/*.md", "experiments/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "wandb"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|collections\.abc|datetime|dist|nn)\..*")]  # of other projects

default_role = "code"  # docstrings have code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autoclass_content = "both"

html_theme = "furo"
html_title = f"adloco_dist {__version__}"
html_extra_path = ["index.html"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page a table of contents for each section of the index: the links in the section's table."""
    if page != root_doc:
        return
    index = (Path(app.srcdir) / f"{INDEX}.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (.+)$", index, flags=re.MULTILINE)[1:]
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        links = re.findall(r"^\| \[(.+?)\]\((.+)\.md\)", section, flags=re.MULTILINE)
        targets = [(text, normpath(f"docs/{target}")) for text, target in links]
        pages = [f"{text} </{target}>" if target != root_doc else f"All pages </{INDEX}>" for text, target in targets]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def keep_colons(app: Sphinx, kind: str, name: str, it: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking what is before a colon in the text about a field for the field's type."""
    if kind in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment, since napoleon looks at the first line alone


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("source-read", add_navigation)
