"""The picture of a pool: who trained when, who merged into whom, with which weights, and what came of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import altair as alt
import numpy as np

from adloco_dist.report.figures import ROWS, WIDTH, Figure, size
from adloco_dist.report.history import History
from adloco_dist.report.sampling import Point
from adloco_dist.run.rows import Record
from adloco_dist.text import ranks_in_words

LANE, STEP = 62, 260
"""Pixels of a trainer, and between two merges."""
MAX_LABELLED = 16
"""Merges up to which the picture says in words what the table below it says, too."""
UNKNOWN = "unknown"
THICKNESS = alt.Scale(domain=[1, 8], range=[3, 14], clamp=True)
"""Pixels of a lane, by the trainer's workers."""


@dataclass(frozen=True)
class Joined:
    """A merge, as its survivor's row has it."""

    before_round: int
    survivor: int
    shares: Mapping[int, float]
    losses: Mapping[int, float]
    """Validation losses of members, as far as they were evaluated and finite."""
    loss: float | None
    """That of their average."""
    ranks: Sequence[int]
    workers: int
    policy: str

    @classmethod
    def of(cls, row: Record) -> "Joined":
        merge = row["merge"]
        losses = {int(member): loss for member, loss in merge.get("member_losses", {}).items() if loss is not None}
        shares = {int(member): float(share) for member, share in merge["shares"].items()}
        return cls(
            row["round"], merge["survivor"], shares, losses, merge.get("loss"), row["ranks"], row["workers"],
            merge["policy"],
        )  # fmt: skip


def merges_of(history: History) -> list[Joined]:
    """All merges, in the order of rounds."""
    return [Joined.of(row) for row in history.records("merge")]


def place_in_words(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """Return ranks with their nodes, as far as these are known."""
    found = sorted({nodes[rank] for rank in ranks if rank < len(nodes)})
    where = f" on node{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}" if found else ""
    return ranks_in_words(ranks) + where


def merge_tree(history: History, nodes: Sequence[int]) -> Figure | None:
    """Every trainer as a lane that ends where it merges into another; None: no round was trained.

    Merges are evenly spaced, for many happen in the first rounds of a long run; the axis says when each was.

    Args:
        nodes: the node of every rank.
    """
    return _Tree(history, merges_of(history), nodes).figure() if history.num_rounds else None


@dataclass(frozen=True)
class _Tree:
    history: History
    merges: Sequence[Joined]
    nodes: Sequence[int]

    @cached_property
    def steps(self) -> list[int]:
        """The rounds before which trainers merged, ascending; 0 before and the last round behind them."""
        between = sorted({merge.before_round for merge in self.merges})
        return [0, *between, self.history.num_rounds + 1]

    @property
    def is_labelled(self) -> bool:
        """Whether there is room for words."""
        return len(self.steps) - 2 <= MAX_LABELLED

    def figure(self) -> Figure:
        lanes = self.history.trainers
        drawn = [point for trainer in lanes for point in self._lives(trainer)]
        drawn += [point for merge in self.merges for point in self._joints(merge)]
        base = alt.Chart(alt.NamedData(ROWS))
        when = [self._when(step) for step in range(len(self.steps))]
        axis = alt.Axis(
            values=list(range(len(when))), labelExpr=f"{when}[datum.value]", grid=False, ticks=False, domain=False
        )
        x = alt.X("step:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, len(when) - 1], nice=False))
        y = alt.Y(
            "trainer:Q", title=None, scale=alt.Scale(domain=[max(lanes) + 0.5, min(lanes) - 0.5], nice=False),
            axis=alt.Axis(values=lanes, labelExpr="'trainer ' + datum.value", grid=False),
        )  # fmt: skip
        colors = alt.Color("trainer:N", legend=None, scale=alt.Scale(domain=lanes, scheme="tableau10"))
        lives, joints = (base.transform_filter(f"datum.kind == '{kind}'") for kind in ("life", "joint"))
        thickness = alt.StrokeWidth("workers:Q", legend=None, scale=THICKNESS)
        layers = [
            lives.mark_rule(strokeCap="round").encode(
                x=x, x2="step_end", y=y, color=colors, strokeWidth=thickness,
                tooltip=["trainer:N", "place:N", "workers:Q", "batch:N", "rounds:N"],
            )
        ]  # fmt: skip
        if self.merges:
            tooltip = ["trainer:N", "survivor:N", "share:Q", "loss:N", "merged_loss:N", "place:N"]
            layers.append(
                joints.mark_rule(strokeWidth=2).encode(x=x, y=y, y2="survivor", color=colors, tooltip=tooltip)
            )
        if self.is_labelled:
            layers += [
                lives.mark_text(dx=4, dy=16, align="left", color="#5d6778").encode(x=x, y=y, text="place:N"),
                lives.mark_text(dx=4, dy=-12, align="left", fontWeight="bold").encode(x=x, y=y, text="after:N"),
                joints.mark_text(dx=-6, dy=-12, align="right").encode(x=x, y=y, text="before:N"),
            ]
        caption = (
            "A lane is a trainer; it gets thicker with its workers. Left of a merge: the weight of each member in the "
        )
        caption += "average, and its validation loss. Right of it, in bold: the loss of the average."
        width = max(WIDTH, STEP * (len(when) - 1)) if self.is_labelled else WIDTH
        shape = {**size(max(90, LANE * len(lanes))), "width": width}
        return Figure(
            "merges", "Trainers and merges", caption, alt.layer(*layers).properties(**shape), drawn, is_wide=True
        )

    def _when(self, step: int) -> list[str]:
        """What the axis says of a step: the round, and the seconds until then."""
        round_ = self.steps[step]
        if not step:
            return ["start"]
        is_end = step == len(self.steps) - 1
        seconds = self.history.axes["seconds"][self._place(round_ - 1)]
        when = f"{seconds:,.0f} s" if math.isfinite(seconds) else ""
        return [f"end of round {round_ - 1:,}" if is_end else f"before round {round_:,}", when]

    def _place(self, round_: int) -> int:
        """Where a round is in the history, or the first behind it."""
        return min(int(np.searchsorted(self.history.rounds, round_)), len(self.history.rounds) - 1)

    def _lives(self, trainer: int) -> list[Point]:
        """A stretch of a trainer between two merges that it is in."""
        history = self.history
        rows = history.rows_of(trainer)
        rows = rows[history.row_rounds[rows] > 0]
        if not len(rows):
            return []
        rounds = history.row_rounds[rows]
        grown = {merge.before_round: merge for merge in self.merges if merge.survivor == trainer}
        starts = [int(rounds[0]), *(round_ for round_ in grown if round_ > rounds[0])]
        lives: list[Point] = []
        for start, end in zip(starts, [*starts[1:], int(rounds[-1]) + 1], strict=True):
            of_life = rows[(rounds >= start) & (rounds < end)]
            batches = history.values("total_batch")[of_life[[0, -1]]]
            merged = f"loss {loss_in_words(grown[start].loss)}" if start in grown else ""
            lives.append({
                "kind": "life", "trainer": trainer, "workers": _whole(float(history.values("workers")[of_life[0]])),
                "place": self._ranks(int(of_life[0])), "batch": _batch(*batches.tolist()),
                "rounds": f"{start:,} to {end - 1:,}", "after": merged,
                "step": self._step(start), "step_end": self._step(end),
            })  # fmt: skip
        return lives

    def _step(self, round_: int) -> float:
        """Where the beginning of a round is on the axis."""
        return float(np.interp(round_, [1, *self.steps[1:]], range(len(self.steps))))

    def _ranks(self, row: int) -> str:
        if "ranks" not in self.history.table.column_names:
            return ""
        ranks = self.history.table["ranks"].chunk(0)[row].as_py()
        return place_in_words(ranks, self.nodes) if ranks else ""

    def _joints(self, merge: Joined) -> list[Point]:
        """Where the members of a merge meet, before its first round."""
        found: list[Point] = []
        for member, share in merge.shares.items():
            loss = loss_in_words(merge.losses.get(member))
            label = f"weight {share:.2f}" if share else "left out"
            found.append({
                "kind": "joint", "trainer": member, "survivor": merge.survivor, "share": round(share, 4), "loss": loss,
                "before": label if loss == UNKNOWN else f"{label}, loss {loss}",
                "merged_loss": loss_in_words(merge.loss), "place": place_in_words(merge.ranks, self.nodes),
                "step": self.steps.index(merge.before_round),
            })  # fmt: skip
        return found


def loss_in_words(loss: float | None) -> str:
    """Return a loss, which may not be known."""
    return UNKNOWN if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) else 1


def _batch(first: float, last: float) -> str:
    shown = [f"{value:,.0f}" for value in (first, last) if math.isfinite(value)]
    return shown[0] if len(set(shown)) == 1 else " to ".join(shown)
