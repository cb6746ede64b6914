"""What averages send, before any is taken; and on clusters of other sizes, the rounds that would be long enough."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from adloco_dist.averaging.group import ring_bytes_sent
from adloco_dist.config import RoundLength, Settings, SettingsError
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.policy.layout import Layout, experiment_layout
from adloco_dist.policy.simulation import FLOPS_PER_PARAMETER, computing_seconds, shortest_round
from adloco_dist.pool.flat_model import vector_dtype
from adloco_dist.pool.trainer import new_averager
from adloco_dist.terminal import new_table

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
class Traffic:
    """The bytes that ranks send in a round; a trainer is given by its seats."""

    settings: Settings
    num_parameters: int
    """Trained parameters of the whole model."""
    nodes: Sequence[int]
    """The node of every rank."""
    in_four_bits: bool = False
    """Whether 4 bits of each element travel, with wire.format=adaptive, and not its sign alone."""

    def of_rank(self, seats: Sequence[int]) -> int:
        """What each of a trainer's ranks sends: its part of the model, to those that hold the same part."""
        settings, size = self.settings, self.settings.pool.ranks_per_worker
        dtype, num_elements = vector_dtype(settings.precision), -(-self.num_parameters // size)
        ranks = [size * seat for seat in seats]  # of the first part; the others are as large
        if settings.algorithm.is_data_parallel:
            return settings.algorithm.updates_per_round * ring_bytes_sent(num_elements * dtype.itemsize, len(ranks))
        averager = new_averager(settings.wire, dtype, self.nodes, self.in_four_bits)
        return averager.bytes_per_rank(num_elements + 1, 1, ranks)

    def over_link(self, seats: Sequence[int]) -> int:
        """What the fullest of a trainer's nodes sends to others: sums are taken inside of nodes first, part by part."""
        first = {self._node(seat): seat for seat in reversed(seats)}
        return self.settings.pool.ranks_per_worker * self.of_rank(sorted(first.values()))

    def inside(self, seats: Sequence[int]) -> int:
        """What the ranks of the fullest of a trainer's nodes send to each other."""
        most = max(Counter(self._node(seat) for seat in seats).values())
        return max(0, most * self.settings.pool.ranks_per_worker * self.of_rank(seats) - self.over_link(seats))

    def over_fullest_link(self, layout: Layout) -> int:
        """The most that a node sends to others, for all trainers that it has workers of."""
        sent = Counter[int]()
        for trainer in layout.trainers:
            seats = layout.ranks(trainer)
            for node in {self._node(seat) for seat in seats}:
                sent[node] += self.over_link(seats)
        return max(sent.values())

    def _node(self, seat: int) -> int:
        return self.nodes[self.settings.pool.ranks_per_worker * seat]


@dataclass(frozen=True)
class Prediction:
    """A round on so many nodes."""

    num_nodes: int
    num_workers: int
    link_bytes: int
    """What the fullest node sends to others."""
    rounds: Mapping[str, tuple[float, int]]
    """By link: the seconds that those bytes take, and the smallest H with which updates have 95 % of the time."""


def _tokens_of_rank(settings: Settings) -> int:
    """Tokens of an update with the first batch, on the rank that has the most of its sequences."""
    return -(-settings.batching.local_batch // settings.pool.ranks_per_worker) * settings.data.sequence_length


def update_seconds(settings: Settings, parameters: ParameterCount) -> float:
    """Time of a worker's update with that batch."""
    return computing_seconds(parameters.total, _tokens_of_rank(settings), FLOPS_PER_SECOND)


def predictions(
    settings: Settings,
    parameters: ParameterCount,
    ranks_per_node: int,
    numbers_of_nodes: Sequence[int] = NUMBERS_OF_NODES,
) -> list[Prediction]:
    """Rounds on every number of nodes whose ranks and workers fit together."""
    predicted, wire = [], settings.wire
    for num_nodes in numbers_of_nodes:
        nodes = [node for node in range(num_nodes) for _ in range(ranks_per_node)]
        try:
            layout = experiment_layout(settings, nodes)
        except SettingsError:  # of this number of nodes; the run's own was not refused
            continue
        workers = [worker for trainer in layout.trainers for worker in layout.workers[trainer]]
        on_rank = len(workers) // len({seat for worker in workers for seat in worker})
        traffic = [Traffic(settings, parameters.trained, nodes, in_four_bits) for in_four_bits in (False, True)]
        sent = min(format.over_fullest_link(layout) for format in traffic)  # wire.format=adaptive has two
        busy = on_rank * update_seconds(settings, parameters)
        seconds = {link: sent / rate for link, rate in LINKS.items()}
        rounds = {
            link: (transfer, shortest_round(GOOD_UTILISATION, busy, transfer, wire.fragments, wire.delay_updates))
            for link, transfer in seconds.items()
        }
        predicted.append(Prediction(num_nodes, len(workers), sent, rounds))
    return predicted


def print_scale(console: Console, settings: Settings, parameters: ParameterCount, ranks_per_node: int) -> None:
    """Print a row for each number of nodes, with a column for each link, and what the predictions assume."""
    share = f"{GOOD_UTILISATION:.0%}"
    title = f"predicted: seconds of a round's averages on the link of a node with {ranks_per_node} ranks, and the H "
    title += f"from which on updates have {share} of the time"
    table = new_table(("nodes", "workers", "GB sent by a node", *LINKS), title, has_lines=True)
    for row in predictions(settings, parameters, ranks_per_node):
        cells = [f"{_in_words(seconds)} s, H {length:,}" for seconds, length in row.rounds.values()]
        table.add_row(str(row.num_nodes), str(row.num_workers), f"{row.link_bytes / GIGA:,.2f}", *cells)
    if table.rows:
        console.print(table)
        console.print(_assumptions(settings, parameters))


def _in_words(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _assumptions(settings: Settings, parameters: ParameterCount) -> str:
    rate = f"{FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s per GPU"
    bound = ""
    if settings.algorithm.round is RoundLength.link:
        bound = f"; the link will choose H, up to {settings.algorithm.updates_range[1]} (algorithm.updates_range)"
    return (
        f"assumed: an update takes {update_seconds(settings, parameters):.3g} s, which is {FLOPS_PER_PARAMETER} x "
        f"{parameters.total:,} parameters x {_tokens_of_rank(settings):,} tokens of a rank / {rate} (an H100 in "
        f"docs/gpus.md); latencies, and traffic inside of nodes, are not counted{bound}"
    )
