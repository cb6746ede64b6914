"""Draw docs/evidence.md's pictures from the records beside this file: python experiments/pictures.py."""

import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from cases import SEEDS
from kept import Records
from machines import SEEDS as MACHINES_SEEDS
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from questions import BATCHES, DIFFERENT, POOLS, ROUNDS

DOCS = Path(__file__).parents[1] / "docs"
SIDES = {
    "alone_adamw": "one alone, AdamW", "alone_muon": "one alone, Muon, constant batch", "default_alone": "one alone",
    "two_10": "two, 10 Mbit/s", "two_100": "two, 100 Mbit/s", "four_100": "four, 100 Mbit/s",
    "eight_100": "eight, 100 Mbit/s",
}  # fmt: skip
WARM = 3
"""Evaluations of a run that are not drawn: the first are far above the rest."""


def main() -> None:
    records = Records.kept()
    plt.rcParams |= {
        "svg.hashsalt": "adloco_dist",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    draw_machines(axes[0][0], records)
    draw_rounds(axes[0][1], records)
    draw_batches(axes[1][0], records)
    draw_pools(axes[1][1], records)
    figure.savefig(DOCS / "evidence.svg", metadata={"Date": None})


def draw_machines(axes: Axes, records: Records) -> None:
    """Losses by seconds, a line for each seed."""
    for place, (side, label) in enumerate(SIDES.items()):
        curves = [curve for seed in MACHINES_SEEDS if (curve := records.curve("machines", side, seed))]
        for number, curve in enumerate(curves):
            name = "" if number else label
            axes.plot(*zip(*curve[WARM:], strict=True), color=f"C{place}", linewidth=1, label=name)
    axes.set(title="The default on further machines (tiny)", xlabel="seconds of the run", ylabel="validation loss")
    axes.set_xlim(right=330)  # beside the curves there is room for what they are
    axes.legend(frameon=False, loc="upper right", fontsize="small")


def draw_rounds(axes: Axes, records: Records) -> None:
    """Losses by H in equal seconds; the controller's as a level line."""
    for link in DIFFERENT:
        points = [
            (float(updates), loss)
            for updates in ROUNDS
            for seed in SEEDS
            if (loss := records.loss("rhythm", f"H{updates}_{link}", 60, seed)) is not None
        ]
        _level(axes, _points(axes, points, f"{link} Mbit/s"), records, "rhythm", f"link_{link}", 60)
    axes.set(title="Fixed H, dashed: by the link (nano, AdamW)", xlabel="H", ylabel="loss in 60 s")
    axes.set_xscale("log")
    axes.set_xticks(ROUNDS, [str(updates) for updates in ROUNDS])
    axes.minorticks_off()
    axes.legend(frameon=False)


def draw_batches(axes: Axes, records: Records) -> None:
    """Losses by constant batches in equal seconds; batches that follow what is measured as level lines."""
    points = [
        (float(batch), loss)
        for batch in sorted(BATCHES)
        for seed in SEEDS
        if (loss := records.loss("batches", f"constant_{batch}_10", 90, seed)) is not None
    ]
    _points(axes, points, "constant")
    for place, (question, side, label) in enumerate(
        (("second_machine", "two_10", "by progress per second"), ("batches", "norm_test_10", "norm test")), start=1
    ):
        _level(axes, f"C{place}", records, question, side, 90)
        axes.plot([], [], color=f"C{place}", linestyle="--", label=label)
    axes.set(title="Batches at 10 Mbit/s (tiny, AdamW)", xlabel="sequences", ylabel="loss in 90 s")
    axes.set_xscale("log")
    axes.set_xticks(sorted(BATCHES), [str(batch) for batch in sorted(BATCHES)])
    axes.minorticks_off()
    axes.legend(frameon=False)


def draw_pools(axes: Axes, records: Records) -> None:
    """Losses of pools in equal seconds."""
    sides = [side for side in ("one_trainer", *POOLS) if records.loss("merging", side, 45, 0) is not None]
    for place, side in enumerate(sides):
        losses = [loss for seed in SEEDS if (loss := records.loss("merging", side, 45, seed)) is not None]
        axes.plot(losses, [place] * len(losses), "o", color="C0" if place else "C1")
    axes.set_yticks(range(len(sides)), [side.replace("_", " ") for side in sides])
    axes.invert_yaxis()
    axes.set(title="Four hosts: pools that merge (nano, AdamW)", xlabel="loss in 45 s")


def _points(axes: Axes, points: list[tuple[float, float]], label: str) -> str:
    """Draw points and a line through their means; return the colour."""
    places = sorted({place for place, _ in points})
    means = [statistics.mean(loss for at, loss in points if at == place) for place in places]
    (line,) = axes.plot(places, means, label=label)
    axes.plot([at for at, _ in points], [loss for _, loss in points], "o", color=line.get_color(), markersize=3)
    return to_hex(line.get_color())


def _level(axes: Axes, color: str, records: Records, question: str, side: str, seconds: float) -> None:
    losses = [loss for seed in SEEDS if (loss := records.loss(question, side, seconds, seed)) is not None]
    if losses:
        axes.axhline(statistics.mean(losses), color=color, linestyle="--", linewidth=1)


if __name__ == "__main__":
    main()
