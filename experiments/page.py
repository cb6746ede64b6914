"""Write docs/evidence.md and docs/guide/what-to-expect.md from their templates and the records beside this file:
python experiments/page.py."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from kept import Records
from machines import SEEDS, SIDES, TARGETS
from ratios import extrapolated, interval, ratios
from tables import compressed, delays, lengths, merged, outer_steps, published, rounds, shapes, sizes, texts

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"evidence.template": DOCS / "evidence.md", "expect.template": DOCS / "guide" / "what-to-expect.md"}


class Shown(dict[str, str]):
    """What stands for each {name} of a template; "not run" for a figure whose runs are not there."""

    def __missing__(self, name: str) -> str:
        if name.removesuffix("_seeds") not in TARGETS:
            raise KeyError(name)
        return "0" if name.endswith("_seeds") else "not run"


def page(template: str, records: Records) -> str:
    """A page: every {name} of the template is a figure, or the rows of a table."""
    further = {name: f" ({count} extrapolated)" if count else "" for name, count in extrapolated(records).items()}
    found = ratios(records)
    shown = Shown({name: interval(values) + further[name] for name, values in found.items()})
    shown |= {f"{name}_seeds": str(len(values)) for name, values in found.items()}
    shown |= {f"{name}_of_the_first_seed": interval(values[:1]) for name, values in found.items()}
    shown |= {"sides": _sides(records), "tuning": _tuning(records)}
    shown |= {
        table.__name__: table(records)
        for table in (compressed, delays, lengths, merged, outer_steps, published, rounds, shapes, sizes, texts)
    }
    return (Path(__file__).parent / template).read_text(encoding="utf-8").format_map(shown)


def _sides(records: Records) -> str:
    """By side, the losses at its end and what it has come to."""
    rows = []
    for side, seconds in ((side, one) for side, (_, budgets) in SIDES.items() for one in budgets):
        made = [run for seed in SEEDS if (run := records.by_name.get(f"machines/{side}/{seconds}s/seed{seed}"))]
        if made:
            batches = [run["last_batch"] for run in made]
            lengths = [run["last_updates_per_round"] for run in made]
            rows.append(
                f"| {side} | {seconds} | {interval([run['loss'] for run in made])} | "
                f"{statistics.mean(run['updates'] for run in made):,.0f} | {_range(batches)} | {_range(lengths)} |"
            )
    return "\n".join(rows)


def _tuning(records: Records) -> str:
    """By what was tried, the losses; the best of a kind first."""
    found = sorted(
        (name.split("/")[1].split("_")[:2], run["loss"], " ".join(name.split("/")[1].split("_")[2:]), run["updates"])
        for name, run in records.by_name.items()
        if name.startswith("tuning/")
    )
    return "\n".join(f"| {' '.join(kind)} | {words} | {loss:.4f} | {done:,} |" for kind, loss, words, done in found)


def _range(counts: Iterable[int]) -> str:
    least, most = min(counts := list(counts)), max(counts)
    return str(least) if least == most else f"{least} to {most}"


if __name__ == "__main__":
    for template, path in PAGES.items():
        path.write_text(page(template, Records.kept()), encoding="utf-8")
