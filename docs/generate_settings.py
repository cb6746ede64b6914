"""Write docs/settings.md from the dataclasses of adloco_dist.config: `make docs`.

Types, defaults and when a setting is read come from the fields, texts from the string below each. A run that is started
without settings has these defaults; conf/ holds what its choices change.
"""

import ast
import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from adloco_dist.config import Settings
from adloco_dist.config.compose import CONFIG_MODULE, compose, flatten, to_plain
from adloco_dist.config.marks import ReadWhen, marks_of, ranges_of

PAGE = Path(__file__).with_name("settings.md")
HEADER = """\
# Settings

This page lists every setting of the launcher with its type and its default. `make docs` generates it from the
dataclasses in `src/adloco_dist/config`; edit those instead.

A setting is given on the command line as `section.name=value`; a group choice such as `algorithm=adloco` or
`experiment=paper` sets several settings at once ([choices](guide/start.md#choose-settings)).
`python launch/train.py --print-config` prints all values of a run.

Some settings are read only when others have certain values. If you give one that nothing reads beside the others, the
run says so in its first lines and in its log, `--dry-run` does as well, and a sweep over such a setting is refused.
"""
ALGORITHMS = """\
## What `algorithm` changes

A choice of `algorithm` sets more than the averaging. `adloco` is the default itself. `diloco` is DiLoCo as published
(arXiv 2311.08105), `localsgd` the same with plain averages of the weights, `ddp` the same with averages of the
gradients at every update. These are all settings in which the choices differ, in runs that are started with nothing
else. What the command line gives comes before them.
"""


def reference() -> str:
    """The whole page as Markdown."""
    settings = Settings()
    sections = [_section("Top level", Settings, to_plain(settings))]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            intro = inspect.getdoc(type(value)) or ""
            sections.append(_section(field.name, type(value), to_plain(settings)[field.name], intro))
    return "\n".join([HEADER, ALGORITHMS, _algorithms(), *sections])


def _algorithms() -> str:
    """The settings in which the choices of `algorithm` differ, as a table."""
    choices = sorted(Path(file.name).stem for file in (files(CONFIG_MODULE) / "algorithm").iterdir())
    by_choice = {choice: flatten(to_plain(compose([f"algorithm={choice}"]))) for choice in choices}
    columns = [f"`{choice}`" for choice in choices]
    rows = [
        [f"`{key}`", *(f"`{_value_text(settings[key])}`" for settings in by_choice.values())]
        for key in by_choice[choices[0]]
        if len({str(settings[key]) for settings in by_choice.values()}) > 1
    ]
    lines = [["setting", *columns], ["---"] * (1 + len(choices)), *rows]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), ""])


def _section(title: str, section: type, defaults: dict[str, Any], intro: str = "") -> str:
    prefix = "" if section is Settings else f"{title}."
    texts, read = dict(_field_texts(section)), marks_of(section, ReadWhen)
    lines = [f"## {title}", "", *([intro, ""] if intro else [])]
    for name, kind in get_type_hints(section).items():
        if is_dataclass(kind):
            continue
        meaning = f"{' '.join(texts.get(name, '').split())}{_range_text(section, name)}{_read_text(read.get(name, ()))}"
        facts = f"{_type_text(kind)}; default `{_value_text(defaults[name])}`"
        lines += [f"### `{prefix}{name}`", "", f"*{facts}*", "", meaning, ""]
    return "\n".join(lines)


def _range_text(section: type, name: str) -> str:
    """Which numbers a setting may be; nothing where it may be any of its type."""
    _, rule = ranges_of(section).get(name, (None, ""))
    return f" {rule.capitalize()}." if rule else ""


def _read_text(alternatives: tuple[ReadWhen, ...]) -> str:
    """When a setting is read; nothing where it always is."""
    ways = [" and ".join(f"`{condition}`" for condition in alternative.conditions) for alternative in alternatives]
    return f" Read when {', or when '.join(ways)}." if ways else ""


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


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
