"""The layout, for hundreds of pools and clusters."""

import itertools
import random

import pytest

from adloco_dist.config import Placement
from adloco_dist.policy.layout import Layout, place


def shapes(count: int) -> list[tuple[int, int, list[int]]]:
    """Random (k, M, node of each rank), also with nodes of unequal size and ranks in any order."""
    rng = random.Random(0)
    cases = []
    for _ in range(count):
        sizes = [rng.randint(1, 8) for _ in range(rng.randint(1, 5))]
        nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
        if rng.random() < 0.2:
            rng.shuffle(nodes)
        cases.append((rng.randint(1, 9), rng.randint(1, 12), nodes))
    return cases


def loads(layout: Layout, num_ranks: int) -> list[int]:
    return [sum(len(layout.workers_on(rank, trainer)) for trainer in layout.trainers) for rank in range(num_ranks)]


@pytest.mark.parametrize("placement", Placement)
def test_every_layout_is_balanced_and_uses_distinct_ranks(placement: Placement) -> None:
    for k, m, nodes in shapes(600):
        layout = place(k, m, nodes, placement)
        assert layout.trainers == list(range(k))
        load = loads(layout, len(nodes))
        assert max(load) - min(load) <= 1, (k, m, nodes)
        for trainer in layout.trainers:
            per_rank = [len(layout.workers_on(rank, trainer)) for rank in range(len(nodes))]
            assert sum(per_rank) == m
            assert max(per_rank) - min(per_rank) <= 1, "distinct ranks, or all ranks evenly"
            assert list(layout.workers[trainer]) == sorted(layout.workers[trainer])


def test_pack_gives_real_subgroups_on_one_node() -> None:
    layout = place(4, 2, [0, 0, 0, 0], Placement.pack)
    assert layout == Layout.one_rank_per_worker({0: (0, 1), 1: (2, 3), 2: (0, 1), 3: (2, 3)})


def test_pack_keeps_trainers_inside_nodes_and_spread_does_not() -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    for k, m in ((2, 4), (4, 2), (2, 3), (4, 4), (8, 2), (3, 2)):
        packed, spread = place(k, m, nodes, Placement.pack), place(k, m, nodes, Placement.spread)
        for trainer in range(k):
            assert packed.num_nodes(trainer, nodes) == 1, (k, m)
            assert spread.num_nodes(trainer, nodes) == 2, (k, m)


def test_pack_crosses_as_few_nodes_as_any_balanced_layout_of_small_clusters() -> None:
    for nodes, k, m in (
        ([0, 0, 1, 1], 3, 2),
        ([0, 0, 0, 1, 1, 1], 4, 2),
        ([0, 0, 0, 1, 1, 1], 2, 3),
        ([0, 0, 1], 3, 2),
    ):
        packed = place(k, m, nodes, Placement.pack)
        crossings = sum(packed.num_nodes(trainer, nodes) for trainer in range(k))
        choices = list(itertools.combinations(range(len(nodes)), m))
        best = min(
            sum(len({nodes[rank] for rank in ranks}) for ranks in chosen)
            for chosen in itertools.product(choices, repeat=k)
            if max(loads(Layout.one_rank_per_worker(dict(enumerate(chosen))), len(nodes)))
            - min(loads(Layout.one_rank_per_worker(dict(enumerate(chosen))), len(nodes)))
            <= 1
        )
        assert crossings == best, (nodes, k, m)


def test_a_worker_may_span_several_ranks() -> None:
    layout = Layout({0: ((0, 1), (2, 3)), 1: ((1, 2),)})
    assert layout.ranks(0) == (0, 1, 2, 3)
    assert (layout.num_workers(0), layout.num_nodes(0, [0, 0, 1, 1])) == (2, 2)
    assert layout.workers_on(1, 0) == [0]
    assert list(layout.placed_on(2)) == [0, 1]


def test_questions_about_a_layout() -> None:
    layout = Layout.one_rank_per_worker({0: (0, 0, 1), 3: (1, 2, 2)})
    assert layout.ranks(3) == (1, 2)
    assert layout.num_workers(0) == 3
    assert layout.workers_on(0, 0) == [0, 1]
    assert layout.workers_on(2, 3) == [1, 2]
    assert list(layout.placed_on(1)) == [0, 3]
    assert list(layout.placed_on(2)) == [3]
