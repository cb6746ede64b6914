"""What a run says of averages that do not pay."""

import io
from collections.abc import Sequence

from rich.console import Console

from adloco_dist.config import Settings
from adloco_dist.run.display import UNPAID_ROUNDS, Display
from adloco_dist.run.rows import TrainerRow


def said_after(worths: Sequence[float | None]) -> int:
    """How often it was said, after rounds of so much worth."""
    console = Console(file=io.StringIO(), width=1000)
    display = Display(console, Settings(budget="100rounds"))
    for number, worth in enumerate(worths, start=1):
        display.write([TrainerRow(round=number, trainer=0, pool_tokens=number, worth=worth)])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().count("averaging does not pay on this link: one worker alone")


def test_averages_that_do_not_pay_are_reported_once_and_not_for_one_slow_round() -> None:
    slow = [0.5] * UNPAID_ROUNDS
    assert said_after(slow) == 1
    assert said_after([*slow, *slow]) == 1
    assert said_after([*slow[1:], 1.5, *slow[1:]]) == 0
    assert said_after([None] * 20) == said_after([1.9] * 20) == 0
