"""The environment check: every rank's node, versions, memory and clock, and the link of every pair of nodes."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table

from adloco_dist.config import Settings, SettingsError, require
from adloco_dist.config.compose import compose
from adloco_dist.launch.exit_codes import ends_reported
from adloco_dist.launch.rendezvous import add_torchrun_options, asked_ranks, rendezvous_of
from adloco_dist.terminal import new_console, new_table, report_line
from adloco_dist.text import first_difference

if TYPE_CHECKING:
    from adloco_dist.cluster.environment import Environment, Link
    from adloco_dist.cluster.runtime import Runtime

PARAMETERS = 100_000_000
"""Number of parameters of the model for which the time of an average is shown."""
TABLE_WIDTH = 150
"""Characters of a table's line where the terminal has fewer, or is none."""


def main() -> None:
    """Entry point of launch/check.py; ends the process: 0 if these nodes can train together, 2 if not."""
    parser = argparse.ArgumentParser(
        description="Show what every rank stands on, try and measure the links between nodes, and name differences."
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for launch/train.py")
    parser.add_argument("--payload-mb", type=float, default=16.0, help="of the all-reduces that are measured")
    add_torchrun_options(parser)
    options = parser.parse_intermixed_args()
    with ends_reported() as is_rank:
        require(0 < options.payload_mb <= 10_000, "--payload-mb", options.payload_mb, "must be > 0 and <= 10000")
        if is_rank:
            run_check(options.overrides, int(options.payload_mb * 1e6))
        else:
            compose(options.overrides)
            rendezvous, num_ranks = rendezvous_of(options), asked_ranks(options) or 1
            from adloco_dist.launch.agent import start_ranks  # takes seconds

            start_ranks(rendezvous, num_ranks, ("-m", "adloco_dist.launch.check", *sys.argv[1:]), can_stop=False)


def run_check(overrides: Sequence[str], payload_bytes: int) -> None:
    """Look at this rank and its links; rank 0 shows what all ranks found. Raises a SettingsError on all ranks when they
    cannot train together."""
    from adloco_dist.cluster.environment import measure_links, must_agree, survey
    from adloco_dist.launch.rank import run_together
    from adloco_dist.setup.agreement import LINK_SECONDS, run_disk

    def check(runtime: "Runtime", settings: Settings) -> None:
        environments = survey(runtime, run_disk(settings.run))
        links = measure_links(runtime, runtime.backend, payload_bytes, LINK_SECONDS)
        if runtime.rank == 0:
            _show(environments, links, runtime.backend.name, settings)
        if difference := first_difference([must_agree(environment) for environment in environments]):
            raise SettingsError(f"{difference}; install the same on all nodes")

    run_together(lambda: compose(overrides), "measuring links", check)


def _show(environments: Sequence["Environment"], links: Sequence["Link"], backend: str, settings: Settings) -> None:
    """Print three tables and the differences that matter."""
    from adloco_dist.cluster.environment import remarks

    console = new_console(min_width=TABLE_WIDTH)
    titles = ("rank", "node", "host", "interface", "device", "driver", "torch", "python", "threads", "memory GB")
    numbers = (Column(title, justify="right") for title in ("device GB", "disk GB", "clock ms"))
    table = Table(*titles, *numbers, box=None, pad_edge=False)
    for rank in environments:
        table.add_row(
            str(rank.rank),
            str(rank.node),
            rank.host,
            f"{rank.interface} {rank.address}" if rank.interface else "",
            rank.device,
            rank.driver or "",
            rank.torch,
            rank.python,
            f"{rank.threads} of {rank.cores}",
            f"{rank.memory_bytes / 1e9:.1f}",
            f"{rank.device_memory_bytes / 1e9:.1f}" if rank.device_memory_bytes else "",
            f"{rank.disk_bytes / 1e9:.1f}",
            f"{rank.clock_offset_seconds * 1e3:+.1f}",
        )
    console.print(table)
    if links:
        from adloco_dist.pool.trainer import averagers
        from adloco_dist.setup.forecast import UPDATE_SECONDS, averages_seconds, in_words
        from adloco_dist.setup.scale import Traffic

        formats = averagers()
        title = f"all-reduce between every two nodes ({backend}), and what an average of 100M parameters takes there"
        table = new_table(("nodes", "round trip ms", "MB/s", *(f"{name} s" for name in formats)), title)
        sent = {name: averager.bytes_per_rank(PARAMETERS, 1, (0, 1)) for name, averager in formats.items()}
        on_nodes = Traffic(
            settings, PARAMETERS, [node for node in (0, 1) for _ in range(settings.pool.ranks_per_worker)]
        )
        title = f"a worker on each, wire.format={settings.wire.format.value}, by the time of an update: share of a "
        title += "round in updates, H where it follows, and the progress of both over one's, at most"
        expected = new_table(("nodes", *(f"{seconds:g} s" for seconds in UPDATE_SECONDS)), title)
        for link in links:
            nodes, round_trip = " - ".join(map(str, link.nodes)), link.latency_seconds
            averages = [f"{num_bytes / link.bytes_per_second + round_trip:.3g}" for num_bytes in sent.values()]
            table.add_row(nodes, f"{round_trip * 1e3:.2f}", f"{link.bytes_per_second / 1e6:,.1f}", *averages)
            seconds = averages_seconds(settings, on_nodes.over_link((0, 1)), [link], 2)
            expected.add_row(nodes, *(in_words(settings, 1, 2, seconds, update) for update in UPDATE_SECONDS))
        console.print(table)
        console.print(expected)
    for line in remarks(environments) or ["no differences that matter"]:
        report_line(line)


if __name__ == "__main__":
    main()
