"""What averages would take on clusters of other sizes: bytes, seconds on a link, and rounds that are long enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from adloco_dist.config import RoundLength, Settings, SettingsError
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.policy.forecast import FLOPS_PER_PARAMETER, computing_seconds, shortest_round
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.tools.traffic import Traffic

GOOD_UTILISATION = 0.95
LARGE = 100_000_000
"""Parameters from which on it is predicted: what smaller models compute says little about a GPU."""
NUMBERS_OF_NODES = (2, 4, 8, 16, 32, 64)
LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}
"""Bytes per second that a node sends to others, while it receives as many."""
FLOPS_PER_SECOND = 230e12
"""Of one GPU: what an H100 reached, in bf16 and nothing compiled (docs/gpus.md)."""
GIGA = 1e9


@dataclass(frozen=True)
class Prediction:
    """A round on so many nodes."""

    num_nodes: int
    num_workers: int
    link_bytes: int
    """What the fullest node sends to others."""
    rounds: Mapping[str, tuple[float, int]]
    """By link: the seconds that those bytes take, and the smallest H with which updates have 95 % of the time."""


def tokens_of_rank(settings: Settings) -> int:
    """Tokens of an update with the first batch, on the rank that has the most of its sequences."""
    return -(-settings.batching.local_batch // settings.pool.ranks_per_worker) * settings.data.sequence_length


def update_seconds(settings: Settings, parameters: ParameterCount) -> float:
    """Time of a worker's update with that batch."""
    return computing_seconds(parameters.total, tokens_of_rank(settings), FLOPS_PER_SECOND)


def predictions(settings: Settings, parameters: ParameterCount, ranks_per_node: int) -> list[Prediction]:
    """Rounds on every number of nodes, but for those whose ranks and workers do not fit together."""
    found = []
    for num_nodes in NUMBERS_OF_NODES:
        nodes = [node for node in range(num_nodes) for _ in range(ranks_per_node)]
        try:
            layout = experiment_layout(settings, nodes)
        except SettingsError:  # of this number of nodes; the run's own was not refused
            continue
        workers = [worker for trainer in layout.trainers for worker in layout.workers[trainer]]
        on_rank = len(workers) // len({seat for worker in workers for seat in worker})
        sent = Traffic(settings, parameters.trained, nodes).over_fullest_link(layout)
        busy = on_rank * update_seconds(settings, parameters)
        rounds = {link: _round(settings, busy, sent / rate) for link, rate in LINKS.items()}
        found.append(Prediction(num_nodes, len(workers), sent, rounds))
    return found


def _round(settings: Settings, busy_seconds: float, link_seconds: float) -> tuple[float, int]:
    wire = settings.wire
    length = shortest_round(GOOD_UTILISATION, busy_seconds, link_seconds, wire.fragments, wire.delay_updates)
    return link_seconds, length


def scale_table(found: Sequence[Prediction], ranks_per_node: int) -> Table:
    """A row for each number of nodes, a column for each link."""
    share = f"{GOOD_UTILISATION:.0%}"
    title = f"predicted: seconds of a round's averages on the link of a node with {ranks_per_node} ranks, and the H "
    table = Table(title=f"{title}from which on updates have {share} of the time")
    for name in ("nodes", "workers", "GB sent by a node", *LINKS):
        table.add_column(name, justify="right")
    for row in found:
        cells = [f"{_in_words(seconds)} s, H {length:,}" for seconds, length in row.rounds.values()]
        table.add_row(str(row.num_nodes), str(row.num_workers), f"{row.link_bytes / GIGA:,.2f}", *cells)
    return table


def _in_words(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def assumptions(settings: Settings, parameters: ParameterCount) -> str:
    """What the predictions stand on."""
    rate = f"{FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s per GPU"
    bound = ""
    if settings.algorithm.round is RoundLength.link:
        bound = f"; the link will choose H, up to algorithm.max_updates={settings.algorithm.max_updates}"
    return (
        f"assumed: an update takes {update_seconds(settings, parameters):.3g} s, which is {FLOPS_PER_PARAMETER} x "
        f"{parameters.total:,} parameters x {tokens_of_rank(settings):,} tokens of a rank / {rate} (an H100 in "
        f"docs/gpus.md); latencies, and traffic inside of nodes, are not counted{bound}"
    )
