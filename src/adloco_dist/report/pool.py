"""The picture of a pool: who trained when, who merged into whom, and with which weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import altair as alt

from adloco_dist.report.figures import ROWS, Figure, over_rounds, size
from adloco_dist.report.history import History
from adloco_dist.report.sampling import Point
from adloco_dist.run.rows import Record
from adloco_dist.text import ranks_in_words

LANE = 46
"""Pixels of a trainer."""
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

    @property
    def ended(self) -> list[int]:
        """The members that end."""
        return sorted(member for member in self.shares if member != self.survivor)


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

    Args:
        nodes: the node of every rank.
    """
    if not history.num_rounds:
        return None
    merges = merges_of(history)
    drawn = [*_lives(history, merges, nodes), *(point for merge in merges for point in _joints(history, merge))]
    lanes = history.trainers
    base = alt.Chart(alt.NamedData(ROWS))
    y = alt.Y(
        "trainer:Q", title=None, scale=alt.Scale(domain=[max(lanes) + 0.5, min(lanes) - 0.5], nice=False),
        axis=alt.Axis(values=lanes, labelExpr="'trainer ' + datum.value", grid=False),
    )  # fmt: skip
    colors = alt.Color("trainer:N", legend=None, scale=alt.Scale(domain=lanes, scheme="tableau10"))
    lives = base.transform_filter("datum.kind == 'life'").mark_rule(strokeCap="round")
    lives = lives.encode(
        x=over_rounds(), x2="round_end", y=y, color=colors,
        strokeWidth=alt.StrokeWidth("workers:Q", legend=None, scale=THICKNESS),
        tooltip=["trainer:N", "ranks:N", "workers:Q", "batch:N", "round:Q", "round_end:Q"],
    )  # fmt: skip
    joints = base.transform_filter("datum.kind == 'joint'")
    falls = joints.mark_rule(strokeWidth=2).encode(
        x=over_rounds(), y=y, y2="survivor", color=colors,
        tooltip=["trainer:N", "survivor:N", "share:Q", "loss:N", "merged_loss:N", "ranks:N", "round:Q"],
    )  # fmt: skip
    labels = joints.mark_text(dx=6, dy=-9, align="left", fontSize=11).encode(x=over_rounds(), y=y, text="label:N")
    caption = "A lane is a trainer, as thick as it has workers. Numbers are what members count for in the average."
    layers = alt.layer(lives, *([falls, labels] if merges else [])).properties(**size(max(90, LANE * len(lanes))))
    return Figure("merges", "Trainers and merges", caption, layers, drawn)


def _lives(history: History, merges: Sequence[Joined], nodes: Sequence[int]) -> list[Point]:
    """A stretch of every trainer between two merges that it is in."""
    rounds = history.rounds.tolist()
    batches, workers = history.values("total_batch"), history.values("workers")
    ranks = history.table["ranks"].chunk(0) if "ranks" in history.table.column_names else None
    lives: list[Point] = []
    for trainer in history.trainers:
        rows = [row for row in history.rows_of(trainer).tolist() if history.row_rounds[row]]
        cuts = {merge.before_round for merge in merges if merge.survivor == trainer}
        begins = [0, *(number for number, row in enumerate(rows) if history.row_rounds[row] in cuts and number)]
        for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
            first, last = rows[begin], rows[end - 1]
            start = max(0, rounds.index(history.row_rounds[first]) - 1)
            stop = rounds.index(history.row_rounds[last])
            found = ranks[first].as_py() if ranks is not None else None
            batch = _batch(float(batches[first]), float(batches[last]))
            lives.append({
                "kind": "life", "trainer": trainer, "workers": _whole(float(workers[first])),
                "ranks": place_in_words(found, nodes) if found else "", "batch": batch,
                **{name: float(values[start]) for name, values in history.axes.items()},
                **{f"{name}_end": float(values[stop]) for name, values in history.axes.items()},
            })  # fmt: skip
    return lives


def _joints(history: History, merge: Joined) -> list[Point]:
    """Where the members of a merge meet, before its first round."""
    place = max(0, history.rounds.tolist().index(merge.before_round) - 1)
    at = {name: float(values[place]) for name, values in history.axes.items()}
    return [
        {
            "kind": "joint", "trainer": member, "survivor": merge.survivor, "share": round(share, 4),
            "label": f"{share:.2f}" if share else "left out", "loss": loss_in_words(merge.losses.get(member)),
            "merged_loss": loss_in_words(merge.loss), "ranks": ranks_in_words(merge.ranks), **at,
        }
        for member, share in merge.shares.items()
    ]  # fmt: skip


def loss_in_words(loss: float | None) -> str:
    """Return a loss, which may not be known."""
    return "unknown" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) else 1


def _batch(first: float, last: float) -> str:
    shown = [f"{value:,.0f}" for value in (first, last) if math.isfinite(value)]
    return shown[0] if len(set(shown)) == 1 else " to ".join(shown)
