"""What a run shows while it trains: a line of each round, and on a terminal what fits on it."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from adloco_dist.config import PoolSettings, Settings
from adloco_dist.run.display import Display
from helpers.run_directories import before_training, row, typed


def rounds(num_rounds: int, *trainers: int, **fields: Any) -> list[list[dict[str, Any]]]:
    """The records of the state before training, then of some rounds."""
    trained = [
        [row(number, one, **({"tokens": 500} | fields)) for one in trainers] for number in range(1, num_rounds + 1)
    ]
    return [before_training(*trainers), *trained]


def seen(
    records: Sequence[list[dict[str, Any]]], budget: str, num_trainers: int, earlier_bytes: int = 0,
    console: Console | None = None,
) -> str:  # fmt: skip
    """What a display has printed then; in a file of long lines unless a console is given."""
    console = console or Console(file=io.StringIO(), width=300)
    settings = Settings(pool=PoolSettings(trainers=num_trainers), budget=budget)
    display = Display(console, settings, earlier_bytes=earlier_bytes)
    for rows in records:
        display.write(typed(rows))
    display.close(None)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_has_what_the_pool_and_every_trainer_came_to() -> None:
    records = rounds(4, 0, 1)
    del records[3][0]  # trainer 0 has ended
    records[3][0] |= {"passes": 3, "validation_loss": 3.5}
    before, *lines = seen(records, "4000tokens", 2).splitlines()
    assert before == "round 0 (0 %); trainer 0: validation loss 5.0000; trainer 1: validation loss 5.0000"
    assert re.sub(r", [^,]+ left", ", SOME left", lines[2]) == (
        "round 3 (75 %, SOME left); 3k tokens, 1 of 2 trainers, H 4, 80 % in updates, 10 MB sent; "
        "trainer 1: batch 8 in 3 passes, loss 3.970, validation loss 3.5000"
    )
    assert lines[3].startswith("round 4 (100 %); 4k tokens, 2 of 2 trainers"), "nothing is left"


def test_a_lone_trainer_is_not_counted_and_earlier_bytes_are() -> None:
    last = seen(rounds(2, 0), "2rounds", 1, earlier_bytes=1_000_000_000).splitlines()[-1]
    assert last == "round 2 (100 %); 2k tokens, H 4, 80 % in updates, 1 GB sent; trainer 0: batch 8, loss 3.980"


def test_a_budget_in_seconds_is_spent_by_the_clock_of_the_records() -> None:
    """Which is a simulated one, where time is counted instead of measured."""
    records = rounds(2, 0)
    for number, (trained,) in enumerate(records):
        trained["elapsed_seconds"] = 40.0 * number
    assert "round 2 (80 %" in seen(records, "100seconds", 1).splitlines()[-1]


def test_a_loss_that_rises_is_reported_once() -> None:
    """And not one that is higher for an evaluation or two."""
    records = rounds(10, 0)
    for (trained,), loss in zip(records, (5, 3, 3.2, 3.1, 2.0, 2.03, 2.1, 2.2, 2.3, 2.4, 2.5), strict=True):
        trained["validation_loss"] = loss
    (line,) = (line for line in seen(records, "10rounds", 1).splitlines() if "has risen" in line)
    assert line.startswith("round 8, trainer 0: the validation loss has risen from 2.0000 in round 4 to 2.3000; ")


def test_losses_below_zero_that_fall_are_not_reported() -> None:
    """An own objective's may be."""
    records = rounds(4, 0)
    for (trained,), loss in zip(records, (-1, -2, -2.01, -2.03, -2.02), strict=True):
        trained["validation_loss"] = loss
    assert "has risen" not in seen(records, "4rounds", 1)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("trainers", [1, 4, 16, 40])
def test_a_terminal_shows_all_of_it_whatever_its_size(width: int, trainers: int) -> None:
    """The live display is cut off at the last line of a terminal, where the bar would be."""
    large = {"total_batch": 12_800, "noise_scale": 12_345.6, "tokens": 12_345_678, "validation_loss": 12.3456}
    records = rounds(2, *range(trainers), ranks=list(range(0, 6)), **large)
    terminal = Console(file=io.StringIO(), width=width, height=24, force_terminal=True)
    output = seen(records[1:], "20rounds", trainers, console=terminal)
    frame = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).rpartition("trainer  ranks")[2]
    lines = [line.rstrip() for line in frame.splitlines() if line.strip()]
    last, figures = lines[-1], lines[-2]
    assert re.match(r"round 2 .* 10 % of 20 rounds .* left$", last), output
    assert "2k tokens" in figures
    assert "sent" in figures
    rows = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert rows[0] == ["0", "{0-5}", "1", "12,800", "1", "12,345.6", "1,234,568", "3.980", "12.3456"], "none is broken"
    assert len(rows) == min(trainers, 24 - 7)
    assert ("and 23 more trainers" in lines) == (trainers == 40)
    assert all(len(line) <= width for line in lines)
