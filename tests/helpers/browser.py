"""A real browser without a window, and what its console says."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from helpers.commands import PATIENCE_SECONDS, SLOW_SECONDS

ROUNDS = """
    Number([...document.querySelectorAll(".tile")].find((tile) => tile.innerText.startsWith("rounds"))
        ?.querySelector("b").innerText.replaceAll(",", "") ?? 0)
"""


class Browser:
    """Shows one page at a time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, address: str) -> None:
        """Open a page, and wait until its figures are drawn."""
        self._driver.get(address)
        self.wait_until_drawn("round")

    def wait_until_drawn(self, axis: str) -> None:
        self._wait_until(f"document.body.dataset.drawn === '{axis}'")

    def rounds(self) -> int:
        """How many rounds the page says that the run has trained."""
        return self._driver.execute_script(f"return {ROUNDS.strip()}")

    def wait_until_rounds(self, count: int) -> None:
        """Wait until the page shows this many rounds, and has drawn its figures."""
        self._wait_until(f"{ROUNDS} >= arguments[0] && !!document.body.dataset.drawn", count)

    def choose(self, axis: str) -> None:
        """Press the button of an axis, and wait until all is drawn against it."""
        self._driver.find_element(By.CSS_SELECTOR, f"[data-axis={axis}]").click()
        self.wait_until_drawn(axis)

    def smooth(self, share: float) -> None:
        """Move the slider, and wait until all is drawn."""
        script = """
            const slider = document.getElementById("smoothing");
            slider.value = arguments[0];
            slider.dispatchEvent(new Event("change", { bubbles: true }));
        """
        self._driver.execute_script(script, share)
        self._wait_until("!!document.body.dataset.drawn")

    def click(self, selector: str) -> None:
        """Click on the first such element, also within a picture."""
        element = self._driver.find_element(By.CSS_SELECTOR, selector)
        self._driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", element)
        ActionChains(self._driver).move_to_element(element).click().perform()

    def zoom(self, selector: str) -> None:
        """Turn the wheel over an element while Ctrl is held."""
        script = """
            const element = document.querySelector(arguments[0]);
            const { x, y, width, height } = element.getBoundingClientRect();
            const middle = { clientX: x + width / 2, clientY: y + height / 2 };
            const held = { ctrlKey: true, bubbles: true, cancelable: true };
            element.dispatchEvent(new WheelEvent("wheel", { deltaY: -240, ...held, ...middle }));
        """
        self._driver.execute_script(script, selector)

    def curves(self, figure: str) -> list[tuple[str, float]]:
        """The way of every curve of a figure, and its opacity."""
        script = """
            return [...document.querySelectorAll(`#figure-${arguments[0]} .mark-line path`)].map(
                (path) => [path.getAttribute("d"), Number(path.getAttribute("opacity") ?? 1)]);
        """
        return [(way, opacity) for way, opacity in self._driver.execute_script(script, figure)]

    def opacities(self, figure: str, mark: str) -> list[float]:
        """Of such marks of a figure."""
        script = """
            return [...document.querySelectorAll(`#figure-${arguments[0]} ${arguments[1]}`)].map(
                (path) => Number(path.getAttribute("opacity") ?? 1));
        """
        return self._driver.execute_script(script, figure, mark)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for what the page does after an event."""
        WebDriverWait(self._driver, PATIENCE_SECONDS).until(lambda _: holds())

    def wait_until_curves(self, figure: str, hold: Callable[[list[tuple[str, float]]], bool]) -> None:
        self.wait_until(lambda: hold(self.curves(figure)))

    def marks(self) -> dict[str, int]:
        """How many curves, bars, areas and rules with an extent every figure has; 0: nothing is drawn."""
        script = """
            const shown = ".role-mark path:not([opacity='0']), .role-mark line";  // points under the pointer are clear
            const extended = (mark) => mark.getBBox().width + mark.getBBox().height > 0;
            const of = (figure) => [...figure.querySelectorAll(shown)].filter(extended);
            return Object.fromEntries([...document.querySelectorAll("[id^=figure-]")].map(
                (figure) => [figure.id.replace("figure-", ""), of(figure).length]));
        """
        return self._driver.execute_script(script)

    def axis_titles(self) -> dict[str, list[str]]:
        """The titles of the axes of every figure."""
        script = """
            const of = (figure) => [...figure.querySelectorAll(".role-axis-title text")].map((one) => one.textContent);
            return Object.fromEntries([...document.querySelectorAll("[id^=figure-]")].map(
                (figure) => [figure.id.replace("figure-", ""), of(figure)]));
        """
        return self._driver.execute_script(script)

    def resize(self, width: int) -> None:
        """Make the page so many pixels wide, as a phone or a screen is."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Have the page shown "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def visit(self, address: str) -> None:
        """Open a page without figures."""
        self._driver.get(address)

    def scrolls(self, selector: str) -> list[tuple[int, int]]:
        """Of elements, the width of what is in them, and how much of that is seen."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => [one.scrollWidth, one.clientWidth])"
        return [(width, seen) for width, seen in self._driver.execute_script(script, selector)]

    def scroll_width(self) -> int:
        """The width that the page needs, in pixels."""
        return self._driver.execute_script("return document.documentElement.scrollWidth")

    def widths(self, selector: str, room: str) -> list[tuple[float, float]]:
        """The widths of elements and of the `room` that each stands in."""
        script = """
            const width = (element) => element.getBoundingClientRect().width;
            const around = (element) => width(element.closest(arguments[1]));
            return [...document.querySelectorAll(arguments[0])].map((one) => [width(one), around(one)]);
        """
        return [(width, around) for width, around in self._driver.execute_script(script, selector, room)]

    def colourless(self, selector: str) -> int:
        """How many shapes are neither filled nor drawn with a line that is seen, or nearly clear."""
        script = """
            const clear = (value) => !value || value === "none" || value === "transparent";
            return [...document.querySelectorAll(arguments[0])].filter((shape) => {
                const { fill, stroke, strokeWidth, opacity } = getComputedStyle(shape);
                return opacity < 0.3 || clear(fill) && (clear(stroke) || parseFloat(strokeWidth) === 0);
            }).length;
        """
        return self._driver.execute_script(script, selector)

    def contrasts(self, selector: str) -> list[float]:
        """The contrast of elements' text to what lies behind it (WCAG 2.2, section 1.4.3)."""
        script = r"""
            const parse = (color) => color.match(/[\d.]+/g).map(Number);
            const behind = (element) => {
                for (let one = element; one; one = one.parentElement) {
                    const color = parse(getComputedStyle(one).backgroundColor);
                    if (color.length < 4 || color[3] > 0) return color;
                }
                return [255, 255, 255];
            };
            const written = (element) => getComputedStyle(element)[element.ownerSVGElement ? "fill" : "color"];
            return [...document.querySelectorAll(arguments[0])].map(
                (element) => [parse(written(element)), behind(element)]);
        """
        return [_contrast(*both) for both in self._driver.execute_script(script, selector)]

    def contrasts_in_cells(self, figure: str) -> list[float]:
        """The contrast of the text of every cell of a map to the cell's colour."""
        script = r"""
            const of = (selector) => [...document.querySelectorAll(`#figure-${arguments[0]} ${selector}`)].map((one) =>
                getComputedStyle(one).fill.match(/[\d.]+/g).slice(0, 3).map(Number));
            return [of(".mark-rect.role-mark path"), of(".mark-text.role-mark text")];
        """
        cells, texts = self._driver.execute_script(script, figure)
        return [_contrast(*both) for both in zip(cells, texts, strict=True)]

    def find(self, site: Path, words: str) -> list[str]:
        """The pages that the search of a built site finds, in its order."""
        self._driver.get(f"{(site / 'search.html').as_uri()}?q={quote(words)}")
        wait = WebDriverWait(self._driver, PATIENCE_SECONDS)
        wait.until(lambda driver: driver.find_elements(By.CSS_SELECTOR, "#search-results li a"))
        self._wait_until(
            "/finished|matching|found/i.test(document.querySelector('#search-results p')?.innerText ?? '')"
        )
        links = self._driver.find_elements(By.CSS_SELECTOR, "#search-results li > a")
        return [
            str(link.get_attribute("href")).partition(f"{site.as_uri()}/")[2].partition(".html")[0] for link in links
        ]

    def text(self) -> str:
        return self._driver.execute_script("return document.body.innerText")

    def elements(self, selector: str) -> int:
        return len(self._driver.find_elements(By.CSS_SELECTOR, selector))

    def errors(self) -> list[str]:
        """What the console said since this was last asked."""
        found = [dict(entry) for entry in self._driver.get_log("browser")]
        return [str(entry["message"]) for entry in found]

    def keep_screenshot(self, path: Path) -> None:
        height = self._driver.execute_script("return document.documentElement.scrollHeight")
        self._driver.set_window_size(1300, height + 200)
        assert self._driver.save_screenshot(str(path))

    def keep_screen(self, path: Path) -> None:
        """What is seen of the page without scrolling."""
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self._driver.save_screenshot(str(path))

    def lowest(self, selector: str) -> float:
        """How far from the top of the page, in pixels, the first such element ends."""
        script = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY"
        return self._driver.execute_script(script, selector)

    def _wait_until(self, condition: str, *arguments: object) -> None:
        wait = WebDriverWait(self._driver, PATIENCE_SECONDS)
        wait.until(lambda driver: driver.execute_script(f"return {condition.strip()}", *arguments))


def _contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two colours (WCAG 2.2, section 1.4.3)."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: Sequence[float]) -> float:
    """Of a colour with parts from 0 to 255, and perhaps its opacity after them."""
    parts = [part / 255 for part in color[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, closed in the end."""
    options = webdriver.ChromeOptions()
    # A sandbox needs privileges that containers lack; /dev/shm is small in them.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    # A page of a run that trains, beside other tests, may load for longer than the client waits by default.
    connection: Any = driver.command_executor
    connection.client_config.timeout = SLOW_SECONDS
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def why_unavailable() -> str | None:
    """Why this machine has no browser to test with; None: it has one."""
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return f"Debian's {' and '.join(missing)} are not installed" if missing else None
