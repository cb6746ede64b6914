"""What all benchmarks share: options, interleaved timing, the table, the machine, the JSON file."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "tests"))
"""Benchmarks start ranks and hosts with the helpers of the tests."""


def parse(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under a minute on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def interleave(sides: Sequence[Callable[[], object]], rounds: int, warmup: int = 2) -> list[list[float]]:
    """Seconds of each side in each round, all sides in turn within a round, in alternating order.

    Returns:
        One list per side; entry r of every list was taken in round r.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(warmup + rounds):
        order = range(len(sides)) if number % 2 else reversed(range(len(sides)))
        for side in order:
            start = time.perf_counter()
            sides[side]()
            if number >= warmup:
                seconds[side].append(time.perf_counter() - start)
    return seconds


def together(side: Callable[[], object]) -> Callable[[], None]:
    """A turn of a side that ends on all ranks at once, so that the next begins on all at once, too."""

    def turn() -> None:
        side()
        dist.barrier()

    return turn


def plain_update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, in_bf16: bool = False) -> None:
    """One update of a language model as one would write it by hand.

    Args:
        rows: tokens, a sequence and its next token a row.
        in_bf16: compute under autocast.
    """
    with torch.autocast(rows.device.type, torch.bfloat16, in_bf16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios pair by pair, which a drift of the machine's speed does not move."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def spread(values: Sequence[float], unit: float = 1.0) -> list[str]:
    """Minimum, median and maximum for a table row."""
    return [f"{value / unit:,.2f}" for value in (min(values), statistics.median(values), max(values))]


def machine() -> str:
    """The machine in one line."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    cpu = names[0] if names else platform.machine()
    return (
        f"{len(os.sched_getaffinity(0))} cores of {cpu}, {memory_kb / 2**20:.0f} GiB{gpu}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figures: dict[str, float],
           file: Path | None) -> None:  # fmt: skip
    """Print the table, the figures and the machine; write the figures to `file`."""
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 240)
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name} = {value:.4g}")
    console.print(f"machine: {machine()}")
    if file is not None:
        save(figures, file)


def save(figures: dict[str, float], file: Path) -> None:
    """Write the figures with the command and the machine."""
    command = " ".join(["python", *sys.argv])
    content = {"command": command, "machine": machine(), "figures": figures}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
