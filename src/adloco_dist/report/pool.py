"""The picture of a pool: who trained when, who merged into whom, with which weights, and what came of it."""

import math
from collections.abc import Iterator, Sequence

import altair as alt
import numpy as np

from adloco_dist.report.figures import WIDTH, Figure, Point, new_chart
from adloco_dist.report.history import History
from adloco_dist.run.rows import is_known
from adloco_dist.text import ranks_in_words

LANE, STEP, LEAST_STEP = 62, 260, 200
"""Pixels of a trainer, between two merges in a picture, and of such a step on a page that has room for words in it."""
MAX_LABELLED = 16
"""Merges up to which the picture says in words what the table below it says, too."""
UNKNOWN = "unknown"
THICKNESS = alt.Scale(domain=[1, 8], range=[3, 14], clamp=True)
"""Pixels of a lane, by the trainer's workers."""
CAPTION = (
    "A lane is a trainer; it gets thicker with its workers. Left of a merge: the weight of each member in the average, "
    "and its validation loss. Right of it, in bold: the loss of the average. (Where there is no room for these, the "
    "table has them.) Merges are evenly spaced."
)


def place_in_words(ranks: Sequence[int], nodes: Sequence[int]) -> str:
    """Return ranks with their nodes, as far as these are known."""
    if not ranks:
        return "unknown ranks"
    on_nodes = sorted({nodes[rank] for rank in ranks if rank < len(nodes)})
    where = f" on node{'s' if len(on_nodes) > 1 else ''} {', '.join(map(str, on_nodes))}" if on_nodes else ""
    return ranks_in_words(ranks) + where


def loss_in_words(loss: float | None) -> str:
    """Return a loss, which may not be known."""
    return UNKNOWN if not is_known(loss) else f"{loss:.4f}"


def merge_tree(history: History, nodes: Sequence[int]) -> Figure | None:
    """Every trainer as a lane that ends where it merges into another; None: no round was trained, or there was one.

    Merges are evenly spaced, for many happen in the first rounds of a long run; the axis says when each was. `nodes`
    has the node of every rank.
    """
    if not history.num_rounds or len(history.trainers) == 1:
        return None
    steps = [0, *sorted({row.round for row, _ in history.merges}), history.num_rounds + 1]
    when = [_when(history, round_, is_end=round_ == steps[-1]) for round_ in steps]
    lanes = history.trainers
    is_labelled = len(when) - 2 <= MAX_LABELLED
    width = max(WIDTH, STEP * (len(when) - 1)) if is_labelled else WIDTH
    base = new_chart(max(90, LANE * len(lanes)))
    labels = alt.expr(f"width < {LEAST_STEP * (len(when) - 1)} ? 0 : 1")
    axis = alt.Axis(
        values=list(range(len(when))), labelExpr=f"{when}[datum.value]", grid=False, ticks=False, domain=False
    )
    x = alt.X("step:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, len(when) - 1], nice=False))
    y = alt.Y(
        "trainer:Q",
        title=None,
        scale=alt.Scale(domain=[max(lanes) + 0.5, min(lanes) - 0.5], nice=False),
        axis=alt.Axis(values=lanes, labelExpr="'trainer ' + datum.value", grid=False),
    )
    colors = alt.Color("trainer:N", legend=None, scale=alt.Scale(domain=lanes, scheme="tableau10"))
    thickness = alt.StrokeWidth("workers:Q", legend=None, scale=THICKNESS)
    lives, joints = (base.transform_filter(f"datum.kind == '{kind}'") for kind in ("life", "joint"))
    tooltip = ["trainer:N", "place:N", "workers:Q", "batch:N", "rounds:N"]
    layers = [
        lives.mark_rule(strokeCap="round").encode(
            x=x, x2="step_end", y=y, color=colors, strokeWidth=thickness, tooltip=tooltip
        )
    ]
    if history.merges:
        tooltip = ["trainer:N", "survivor:N", "share:Q", "loss:N", "merged_loss:N", "place:N"]
        layers.append(joints.mark_rule(strokeWidth=2).encode(x=x, y=y, y2="survivor", color=colors, tooltip=tooltip))
    if is_labelled:
        layers += [
            lives.mark_text(dx=4, dy=16, align="left", opacity=labels).encode(x=x, y=y, text="place:N"),
            lives.mark_text(dx=4, dy=-12, align="left", fontWeight="bold", opacity=labels).encode(
                x=x, y=y, text="after:N"
            ),
            joints.mark_text(dx=-6, dy=-12, align="right", opacity=labels).encode(x=x, y=y, text="before:N"),
        ]
    drawn = [
        *(life for trainer in lanes for life in _lives(history, trainer, steps, nodes)),
        *_joints(history, steps, nodes),
    ]
    return Figure("merges", "Trainers and merges", CAPTION, alt.layer(*layers), drawn, picture_width=width)


def _when(history: History, round_: int, is_end: bool) -> list[str]:
    """What the axis says of a round: which it is, and the seconds until it began."""
    if not round_:
        return ["start"]
    seconds = np.interp(round_ - 1, history.rounds, history.axes["seconds"])
    when = f"{seconds:,.0f} s" if math.isfinite(seconds) else ""
    return [f"end of round {round_ - 1:,}" if is_end else f"before round {round_:,}", when]


def _lives(history: History, trainer: int, steps: Sequence[int], nodes: Sequence[int]) -> Iterator[Point]:
    """The stretches of a trainer between two merges that it is in."""
    rows = np.flatnonzero((history.row_trainers == trainer) & (history.row_rounds > 0))
    rounds, batches = history.row_rounds[rows], history.values("total_batch")[rows]
    told = sorted((row for row in history.told if row.trainer == trainer and row.round), key=lambda row: row.round)
    begins = [row for row in told if row.merge or row is told[0]]
    places = range(len(steps))
    for first, end in zip(begins, [*(row.round for row in begins[1:]), *(rounds[-1:] + 1).tolist()], strict=True):
        known = batches[(rounds >= first.round) & (rounds < end) & np.isfinite(batches)]
        sizes = [f"{batch:,.0f}" for batch in (*known[:1], *known[-1:])]
        yield {
            "kind": "life",
            "trainer": trainer,
            "workers": first.workers or 1,
            "place": place_in_words(first.ranks, nodes),
            "batch": " to ".join(dict.fromkeys(sizes)),
            "rounds": f"{first.round:,} to {end - 1:,}",
            "after": f"loss {loss_in_words(first.merge.loss)}" if first.merge else "",
            "step": float(np.interp(first.round, [1, *steps[1:]], places)),
            "step_end": float(np.interp(end, [1, *steps[1:]], places)),
        }


def _joints(history: History, steps: Sequence[int], nodes: Sequence[int]) -> Iterator[Point]:
    """Where the members of every merge meet, before its first round."""
    for row, merge in history.merges:
        for member, share in merge.shares.items():
            loss = loss_in_words(merge.member_losses.get(member))
            weight = f"weight {share:.2f}" if share else "left out"
            yield {
                "kind": "joint",
                "trainer": member,
                "survivor": merge.survivor,
                "share": round(share, 4),
                "loss": loss,
                "before": weight if loss == UNKNOWN else f"{weight}, loss {loss}",
                "merged_loss": loss_in_words(merge.loss),
                "place": place_in_words(row.ranks, nodes),
                "step": steps.index(row.round),
            }
