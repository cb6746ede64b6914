"""What a run says of averages that do not pay, and of ranks that are too slow."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from adloco_dist.config import Settings
from adloco_dist.run.display import DOES_NOT_PAY, UNPAID_ROUNDS, Display
from adloco_dist.run.rows import TrainerRow


def said_after(line: str, *rounds: dict[str, Any]) -> int:
    """How often a line was said, after rounds with these fields."""
    console = Console(file=io.StringIO(), width=1000)
    display = Display(console, Settings(budget="100rounds"))
    for number, fields in enumerate(rounds, start=1):
        display.write([TrainerRow(round=number, trainer=0, pool_tokens=number, **fields)])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().count(line)


def of_worth(worths: Sequence[float | None]) -> list[dict[str, Any]]:
    return [{"worth": worth} for worth in worths]


def test_averages_that_do_not_pay_are_reported_once_and_not_for_one_slow_round() -> None:
    slow = [0.5] * UNPAID_ROUNDS
    assert said_after(DOES_NOT_PAY, *of_worth(slow)) == 1
    assert said_after(DOES_NOT_PAY, *of_worth([*slow, *slow])) == 1
    assert said_after(DOES_NOT_PAY, *of_worth([*slow[1:], 1.5, *slow[1:]])) == 0
    assert said_after(DOES_NOT_PAY, *of_worth([None] * 20)) == said_after(DOES_NOT_PAY, *of_worth([1.9] * 20)) == 0


def test_a_rank_for_which_rounds_are_long_is_reported_once() -> None:
    def rounds(*taken: int) -> list[dict[str, Any]]:
        return [{"updates": taken[0], "worker_updates": list(taken)}] * 2 * UNPAID_ROUNDS

    said = "a rank is so slow that rounds have 100 updates"
    assert said_after(said, *rounds(100, 100, 1)) == 1
    assert said_after("that costs the others about 60% of the time", *rounds(100, 100, 1)) == 1, "50 ** 0.12"
    assert said_after(said, *rounds(100, 100, 1), *rounds(100, 1)) == 1
    assert said_after("a rank is so slow", *rounds(3, 1)) == said_after("a rank is so slow", *rounds(20, 10, 20)) == 0
