"""Write docs/settings.md from the dataclasses of adloco_dist.config: `make docs`.

Types come from the annotations, texts from the string below each field, and defaults from what launch/train.py composes
when it is started without settings.
"""

import ast
import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from adloco_dist.config import Settings
from adloco_dist.config.compose import compose, to_plain

PAGE = Path(__file__).with_name("settings.md")
HEADER = """\
# Settings

This page lists every setting of the launcher with its type and its default. `make docs` generates it from the
dataclasses in `src/adloco_dist/config`; edit those instead.

A setting is given on the command line as `section.name=value`. A default is the value in a run that is started as
`python launch/train.py`; a group choice such as `algorithm=adloco` or `experiment=paper` sets several settings at once
([choices](guide/start.md#choose-settings)). `python launch/train.py --print-config` prints all values of a run.
"""


def reference() -> str:
    """The whole page as Markdown."""
    settings = compose([])
    sections = [_section("Top level", Settings, to_plain(settings))]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            intro = inspect.getdoc(type(value)) or ""
            sections.append(_section(field.name, type(value), to_plain(settings)[field.name], intro))
    return "\n".join([HEADER, *sections])


def _section(title: str, section: type, defaults: dict[str, Any], intro: str = "") -> str:
    prefix = "" if section is Settings else f"{title}."
    texts = dict(_field_texts(section))
    rows = [
        f"| `{prefix}{name}` | {_type_text(kind)} | `{_value_text(defaults[name])}` | {_cell(texts.get(name, ''))} |"
        for name, kind in get_type_hints(section).items()
        if not is_dataclass(kind)
    ]
    lines = [f"## {title}", "", *([intro, ""] if intro else []), "| setting | type | default | meaning |"]
    return "\n".join([*lines, "|---|---|---|---|", *rows, ""])


def _field_texts(section: type) -> Iterable[tuple[str, str]]:
    """Each field's name with the string literal below it, which is where the dataclasses document a field."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def _type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{choice.name}`" for choice in kind)
    if get_origin(kind) is list:
        return f"list of {_type_text(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if choices := get_args(kind):
        return " or ".join(_type_text(choice) for choice in choices)
    return "null" if kind is NoneType else kind.__name__


def _value_text(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1_000_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
