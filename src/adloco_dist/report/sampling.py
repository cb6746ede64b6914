"""Long curves cut down to what a picture can show, without losing an extreme."""

from collections.abc import Mapping

import numpy as np

from adloco_dist.report.history import Numbers, Values

BUCKETS = 150
"""Stretches of a curve, each of which is drawn with its first and last, lowest and highest value."""
DIGITS = 6
"""Significant digits of what is drawn."""
Point = dict[str, float | int | str | None]


def kept(values: Values) -> Numbers:
    """Which of the values are drawn, in ascending order: all of a short curve, four of every stretch of a long one."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= 4 * BUCKETS:
        return known
    chosen = []
    for stretch in np.array_split(known, BUCKETS):
        inside = values[stretch]
        chosen.append(stretch[[0, int(inside.argmin()), int(inside.argmax()), -1]])
    return np.unique(np.concatenate(chosen))


def points(axes: Mapping[str, Values], places: Numbers, values: Values, name: str, series: str) -> list[Point]:
    """The points of a curve as a chart takes them.

    Args:
        axes: for every round, what has passed at its end.
        places: for every value, the place of its round in `axes`.
        name: what the values are called in the data.
        series: what the curve is called.
    """
    chosen = kept(values)
    columns = {axis: rounded(found[places[chosen]]) for axis, found in axes.items()}
    columns[name] = rounded(values[chosen])
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [{"series": series, **row} for row in rows]


def rounded(values: Values) -> list[float | int]:
    """Plain numbers with as many digits as a picture can show; whole ones are whole."""
    return [int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def stretches(values: list[str | None], places: Numbers) -> list[tuple[int, int, str]]:
    """Rounds in a row that have the same word: the places of the first and the last, and the word."""
    found: list[tuple[int, int, str]] = []
    for value, place in zip(values, places.tolist(), strict=True):
        if value is None:
            continue
        if found and found[-1][2] == value and found[-1][1] in (place, place - 1):
            found[-1] = (found[-1][0], place, value)
        else:
            found.append((place, place, value))
    return found
