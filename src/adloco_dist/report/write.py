"""Pages of runs as files: `launch/report.py RUN...`, and what a run writes of itself when it ends."""

import argparse
import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adloco_dist.command import as_tool
from adloco_dist.config import SettingsError
from adloco_dist.report.processes import helpers
from adloco_dist.report.source import Source, read_source
from adloco_dist.report.vega import picture, vega_script
from adloco_dist.run.manifest import write_content
from adloco_dist.run.reading import RUN_FILE
from adloco_dist.run.rows import METRICS_FILE
from adloco_dist.terminal import report_error, show
from adloco_dist.text import reason

if TYPE_CHECKING:
    from adloco_dist.report.page import Page

HTML_FILE, FIGURES_FOLDER = "report.html", "figures"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/report.py."""
    parser = argparse.ArgumentParser(
        description="Write a page that shows what happened in a run, or how several runs compare: report.html, which "
        "needs neither a network nor a server, and its figures as pictures. Runs may be killed, or still train.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run directory, or a folder of runs, as a sweep leaves it"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="where to write; default: RUN itself, of several RUNs ./report"
    )
    parser.add_argument("--loss", type=float, help="of several: count tokens, bytes and time to this validation loss")
    options = parser.parse_args(arguments)
    with as_tool(), _without_collections(), helpers() as processes:
        folders = [folder for run in options.runs for folder in run_folders(Path(run))]
        sources = [read_source(folder, processes=processes) for folder in folders]
        for source in sources:
            for problem in source.problems:
                report_error(f"note: RUN={source.directory}: {problem}")
        default = options.runs[0] if len(options.runs) == 1 else "report"
        folder = Path(options.output or default)
        show(str(write_page(page(sources, options.loss), folder, processes)))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Millions of values are read, none of them in a cycle, and each garbage collection would look at all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def page(sources: Sequence[Source], wanted_loss: float | None = None) -> "Page":
    """The page of a run, or of several."""
    from adloco_dist.report.one import page_of  # with altair: half a second, after others have begun to read
    from adloco_dist.report.several import page_of_several

    return page_of(sources[0]) if len(sources) == 1 else page_of_several(sources, wanted_loss)


def run_folders(folder: Path) -> list[Path]:
    """A run directory itself, or else the run directories in a folder, by name; raises a SettingsError without any."""

    def is_run(path: Path) -> bool:
        return (path / RUN_FILE).is_file() or (path / METRICS_FILE).is_file()

    if is_run(folder) or not folder.is_dir():
        return [folder]
    folders = sorted(filter(is_run, folder.iterdir()))
    if not folders:
        raise SettingsError(f"RUN={folder}: is no run, and holds none; name a run directory, or a folder of such")
    return folders


def write_page(page: "Page", folder: Path, processes: Executor | None = None) -> Path:
    """Write a page, and every figure as a picture beside it, with the help of `processes` that are running; returns the
    page's path, or raises a SettingsError if they cannot be written."""
    path, pictures = folder / HTML_FILE, folder / FIGURES_FOLDER
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        with helpers(processes) as processes:
            script = processes.submit(vega_script)
            drawn = {figure.name: processes.submit(picture, figure.picture()) for figure in page.figures}
            html = page.html(script.result()).encode()
            for name, png in drawn.items():
                (pictures / f"{name}.png").write_bytes(png.result())
            write_content(path, html)
    except OSError as error:
        rule = f"{HTML_FILE} and {FIGURES_FOLDER}/ cannot be written ({reason(error)}); name another folder"
        raise SettingsError(f"--output={folder}: {rule}") from error
    return path


if __name__ == "__main__":
    main()
