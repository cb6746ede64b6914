"""The documentation: what pages link to, set, run and quote exists, and the settings reference is current."""

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from adloco_dist.config.compose import compose, parse
from adloco_dist.config.settings import setting_names
from helpers.commands import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docker").glob("*.md"), *ROOT.glob("examples/*.md")]
)
GUIDES = [path for path in PAGES if path.name != "CHANGELOG.md"]
"""Pages about the present; the changelog names settings of the past."""
SOURCES = sorted(
    path
    for room in ("src", "tests", "bench", "gpu", "experiments", "launch", "examples", "conf", "slurm", "docs")
    for path in (ROOT / room).rglob("*")
    if path.suffix in (".py", ".yaml", ".sh", ".sbatch")
)
"""Code and settings, whose docstrings and comments cite pages."""
FILE_ENDINGS = (".json", ".jsonl", ".py", ".md")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return "".join(page.read_text(encoding="utf-8").split("```")[::2])


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every command in a page's code blocks that trains."""
    blocks = "\n".join(page.read_text(encoding="utf-8").split("```")[1::2])
    for line in blocks.replace("\\\n", " ").splitlines():
        if found := re.match(r"(?:python|torchrun) (?:.* )?(?:launch/train|my_script)\.py (.*)", line):
            yield shlex.split(found[1], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_name_files(page: Path) -> None:
    """As readers of the checkout need it; `make site` checks headings, and that links lead somewhere in the site."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def headings(page: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE))


def test_sources_cite_pages_and_sections_that_exist() -> None:
    """A page is cited as docs/theory.md, a section of it as docs/theory.md, "What travels"."""
    cited = 0
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        for page, section in re.findall(r"\b(docs/[\w/-]+\.md)(?:,\s+\"([^\"]+)\")?", text):
            cited += bool(section)
            assert (ROOT / page).exists(), f"{name(source)} cites {page}"
            assert not section or section in headings(ROOT / page), f"{name(source)} cites {page}, {section!r}"
    assert cited > 8


def test_sources_cite_nothing_that_is_not_in_the_repository() -> None:
    """A specification that readers do not have, by its name or by the numbers of its sections and invariants."""
    unknown = re.compile(
        r"\bdesign[,:]? (?:section|[0-9])|[(]design\b|\bin the design\b|\binvariants? [0-9]", re.IGNORECASE
    )
    found = {name(source): unknown.findall(source.read_text(encoding="utf-8")) for source in SOURCES}
    assert {source: words for source, words in found.items() if words} == {}


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", prose(index))}
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - linked == {index}


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_named_settings_exist(page: Path) -> None:
    settings = set(setting_names())
    sections = {setting.split(".")[0] for setting in settings if "." in setting}
    named = {
        match[1]
        for match in re.finditer(r"`'?(([a-z]+)\.[a-z_0-9.]+)[=`\[]", prose(page))
        if match[2] in sections and not match[1].endswith((*FILE_ENDINGS, "..."))
    }
    assert named - settings == set()


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_documented_commands_have_valid_settings(page: Path) -> None:
    for words in commands(page):
        overrides = [word for word in words if re.match(r"\+?[a-z_./]+=", word)]
        if "-m" in words:
            assert parse(overrides), words
        else:
            compose(overrides)


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_documented_python_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, name(page), "exec")


def test_messages_in_troubleshooting_are_printed() -> None:
    """Words between what differs from case to case, and between punctuation, stand in the sources as they are."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    sources = re.sub(r'"\s+f?"', "", sources)  # strings that continue on the next line
    page = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    parts = {part.strip() for message in messages for part in re.split(r"\.\.\.|[:;()]", message)}
    assert {part for part in parts if part.count(" ") > 1 and part not in sources} == set()


def test_the_settings_reference_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"))
    assert generator["PAGE"].read_text(encoding="utf-8") == generator["reference"](), "run make docs"
