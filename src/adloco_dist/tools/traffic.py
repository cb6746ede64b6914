"""What averages send, before any is taken: by rank, and over the links of nodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adloco_dist.averaging.group import ring_bytes_sent
from adloco_dist.config import Settings
from adloco_dist.policy.layout import Layout
from adloco_dist.pool.averager import new_averager
from adloco_dist.pool.flat_model import vector_dtype


@dataclass(frozen=True)
class Traffic:
    """The bytes of a round. Trainers are named by their seats, which are ranks where a worker fits one."""

    settings: Settings
    num_parameters: int
    """Trained ones of the whole model."""
    nodes: Sequence[int]
    """The node of every rank."""

    def of_rank(self, seats: Sequence[int]) -> int:
        """What each of a trainer's ranks sends: its part of the model, to those that hold the same part."""
        settings, size = self.settings, self.settings.pool.ranks_per_worker
        dtype, num_elements = vector_dtype(settings.precision), -(-self.num_parameters // size)
        ranks = [size * seat for seat in seats]  # of the first part; the others are as large
        if settings.algorithm.is_data_parallel:
            return settings.algorithm.updates_per_round * ring_bytes_sent(num_elements * dtype.itemsize, len(ranks))
        return new_averager(settings.wire, dtype, self.nodes).bytes_per_rank(num_elements + 1, 1, ranks)

    def over_link(self, seats: Sequence[int]) -> int:
        """What the fullest of a trainer's nodes sends to others: sums are taken inside of nodes first, part by part."""
        first = {self._node(seat): seat for seat in reversed(seats)}
        return self.settings.pool.ranks_per_worker * self.of_rank(sorted(first.values()))

    def over_fullest_link(self, layout: Layout) -> int:
        """What the node that sends the most sends to others, for all trainers that it has workers of."""
        sent = Counter[int]()
        for trainer in layout.trainers:
            seats = layout.ranks(trainer)
            for node in {self._node(seat) for seat in seats}:
                sent[node] += self.over_link(seats)
        return max(sent.values())

    def _node(self, seat: int) -> int:
        return self.nodes[self.settings.pool.ranks_per_worker * seat]
