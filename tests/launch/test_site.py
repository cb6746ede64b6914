"""The site as it is built: what its search finds, and how it stands on a phone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from adloco_dist.config import Settings
from adloco_dist.config.compose import flatten, to_plain
from helpers.browser import Browser
from helpers.commands import ROOT

pytestmark = pytest.mark.needs("browser")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-c", "docs", ".", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("slow link", "docs/guide/link"),
        ("bandwidth", "docs/guide/link"),
        ("compression", "docs/guide/link"),
        ("multi-node", "docs/guide/nodes"),
        ("multiple nodes", "docs/guide/nodes"),
        ("FSDP", "docs/guide/large-models"),
        ("throughput", "docs/guide/report"),
        ("own loop", "docs/guide/own-loop"),
        ("updates_per_round", "docs/settings"),
        ("loss spikes", "docs/guide/troubleshooting"),
    ],
)
def test_what_people_search_for_is_among_the_first_three(words: str, page: str, site: Path, shown: Browser) -> None:
    found = shown.find(site, words)
    assert page in list(dict.fromkeys(found))[:3], found[:6]


def test_the_site_opens_on_the_readme(site: Path) -> None:
    assert "url=README.html" in (site / "index.html").read_text(encoding="utf-8")
    assert "<h1>adloco_dist: " in (site / "README.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [400, 800, 1280])
@pytest.mark.parametrize("page", ["README", "docs/settings", "docs/guide/start", "docs/guide/link"])
def test_pages_fit_a_screen_and_code_is_not_cut_off(page: str, width: int, site: Path, shown: Browser) -> None:
    shown.resize(width)
    shown.visit((site / f"{page}.html").as_uri())
    assert shown.scroll_width() <= width
    assert [sizes for sizes in shown.scrolls(".highlight pre") if sizes[0] > sizes[1]] == []


def test_the_first_screen_says_what_it_is_whether_it_pays_and_how_to_try_it(site: Path, shown: Browser) -> None:
    shown.resize(1280)
    shown.visit((site / "README.html").as_uri())
    shown.keep_screen(ROOT / "build" / "screenshots" / "readme.png")
    assert shown.lowest("table") < shown.lowest("div.highlight") < 900
    text = shown.text()
    assert text.index("Not for you") < text.index("Status:") < text.index("make train"), "all of it before the command"


def test_every_setting_has_an_anchor(site: Path) -> None:
    page = (site / "docs" / "settings.html").read_text(encoding="utf-8")
    settings = [name for name in flatten(to_plain(Settings())) if not name.startswith("model.overrides.")]
    assert len(settings) > 90
    missing = [setting for setting in settings if f'<section id="{re.sub("[._]", "-", setting)}"' not in page]
    assert missing == []


def test_code_can_be_copied(site: Path, shown: Browser) -> None:
    shown.visit((site / "docs" / "guide" / "start.html").as_uri())
    assert shown.elements("button.copybtn") == shown.elements("div.highlight pre") > 0
