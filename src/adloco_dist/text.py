"""Text that messages are made of: strings from outside as one printable line, sets of ranks, quantities."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

LONGEST_LINE = 2000
"""Characters of a line that is reported."""
LONGEST_REASON = 300
"""Characters of what a library says in it."""
KILO = 1000.0
BYTE_UNITS, COUNT_UNITS = (" B", " kB", " MB", " GB", " TB", " PB"), ("", "k", "M", "B", "T")


def printable(text: object) -> str:
    """`text` without what a terminal would obey: control characters other than line ends are shown as \\x1b."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode("ascii")
        for char in shown
    )


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """`text` from outside as it is shown within a line: printable, line ends as spaces, cut off where too long."""
    shown = " ".join(printable(text).split())
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def first_line(error: BaseException) -> str:
    """What an exception says first, or its kind where it says nothing."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one_line(lines[0] if lines else type(error).__name__)


def reason(error: BaseException) -> str:
    """Why something failed, as the words of one line: what the system says, or the whole of the exception's text."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return one_line(said, LONGEST_REASON) or type(error).__name__


def set_of_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as in {0,1,4-7}."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "{" + ",".join(shown) + "}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as in "rank 3" or "ranks {0-3}"; at least one."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {set_of_ranks(ranks)}"


def ranks_by_value(held: Iterable[tuple[int, Hashable]]) -> dict[Hashable, str]:
    """Which ranks hold the same: {value: "rank 3"}, in the order in which values appear."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in held:
        groups.setdefault(value, []).append(rank)
    return {value: ranks_in_words(ranks) for value, ranks in groups.items()}


def values_by_rank(held: Iterable[tuple[int, object]]) -> str:
    """Return values with their ranks, as in "2.13 on ranks {0-3}, 2.12 on rank 4"."""
    by_value = ranks_by_value((rank, str(value)) for rank, value in held)
    return ", ".join(f"{value} on {ranks}" for value, ranks in by_value.items())


def first_difference(members: Sequence[Mapping[str, Any]], ranks: Sequence[int] | None = None) -> str | None:
    """Return "key differs between ranks: ..." for the first key, in order of names, that is not the same in all.

    Without `ranks`, members are of ranks 0, 1, ...
    """
    for key in sorted({key for member in members for key in member}):
        values = [str(member.get(key, "missing")) for member in members]
        if len(set(values)) > 1:
            held = zip(ranks or range(len(values)), values, strict=True)
            return f"{key} differs between ranks: {values_by_rank(held)}"
    return None


def in_bytes(count: float) -> str:
    """Return a number of bytes with three digits, as in "1.23 MB"."""
    return _scaled(count, BYTE_UNITS)


def in_short(count: float) -> str:
    """Return a number with three digits, as in "1.23M" for millions and "1.23B" for billions."""
    return _scaled(count, COUNT_UNITS)


def counted(number: int, noun: str) -> str:
    """Return a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours, as people say them."""
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def _scaled(count: float, units: Sequence[str]) -> str:
    power = min(int(math.log(max(count, 1.0), KILO)), len(units) - 1)
    return f"{float(f'{count / KILO**power:.3g}'):,g}{units[power]}"
