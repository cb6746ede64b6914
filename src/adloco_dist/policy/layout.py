"""Which workers run on which ranks: plain integers (docs/architecture.md, "A round").

Where several ranks hold a worker's model together (pool.ranks_per_worker), such neighbouring ranks are one seat, and
what is called a rank here is a seat. `nodes` is the node of each rank, one entry per rank, in all functions.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from adloco_dist.config import Placement, Settings, SettingsError, require


@dataclass(frozen=True)
class Layout:
    """The ranks, or the one seat, that every worker of every trainer runs on."""

    workers: Mapping[int, tuple[tuple[int, ...], ...]]
    """The ranks of each worker of a trainer, by trainer: one each, except in what `in_ranks` returns."""

    @classmethod
    def one_rank_per_worker(cls, ranks: Mapping[int, Sequence[int]]) -> "Layout":
        """The layout in which worker m of trainer i runs on `ranks[i][m]` alone."""
        return cls({trainer: tuple((rank,) for rank in of_workers) for trainer, of_workers in ranks.items()})

    def in_ranks(self, ranks_per_seat: int) -> "Layout":
        """This layout of seats, with the ranks of each."""

        def ranks(seats: Sequence[int]) -> tuple[int, ...]:
            return tuple(rank for seat in seats for rank in ranks_of_seat(seat, ranks_per_seat))

        return Layout({trainer: tuple(map(ranks, workers)) for trainer, workers in self.workers.items()})

    def without(self, workers: Mapping[int, Collection[int]]) -> "Layout":
        """This layout without some workers, by trainer; those after them take their numbers."""
        return Layout(
            {
                trainer: tuple(ranks for number, ranks in enumerate(spans) if number not in workers.get(trainer, ()))
                for trainer, spans in self.workers.items()
            }
        )

    @property
    def trainers(self) -> list[int]:
        """Ids of the living trainers, ascending: the one order in which collectives are issued."""
        return sorted(self.workers)

    @property
    def rank_sets(self) -> list[tuple[int, ...]]:
        """Every trainer's ranks, in the order of the trainers."""
        return [self.ranks(trainer) for trainer in self.trainers]

    def num_workers(self, trainer: int) -> int:
        return len(self.workers[trainer])

    def ranks(self, trainer: int) -> tuple[int, ...]:
        """The distinct ranks of a trainer, ascending."""
        return tuple(sorted({rank for worker in self.workers[trainer] for rank in worker}))

    def workers_on(self, rank: int, trainer: int) -> list[int]:
        """The workers of a trainer that run on a rank, alone or together with others."""
        return [number for number, ranks in enumerate(self.workers[trainer]) if rank in ranks]

    def placed_on(self, rank: int) -> dict[int, list[int]]:
        """The workers that run on a rank, by trainer; trainers without any there are left out."""
        return {trainer: workers for trainer in self.trainers if (workers := self.workers_on(rank, trainer))}

    def num_nodes(self, trainer: int, nodes: Sequence[int]) -> int:
        return len({nodes[rank] for rank in self.ranks(trainer)})


def place(num_trainers: int, workers_per_trainer: int, nodes: Sequence[int], placement: Placement) -> Layout:
    """Place `num_trainers` x `workers_per_trainer` workers on the ranks.

    Loads differ by at most one; a trainer's workers stand on distinct ranks as long as there are enough, and
    evenly over all ranks otherwise. Within that, `pack` uses few nodes for a trainer and `spread` many.
    """
    everywhere, remainder = divmod(workers_per_trainer, len(nodes))
    vacancies = _vacancies(num_trainers, remainder, nodes, placement)
    ranks: dict[int, Sequence[int]] = {}
    for trainer in range(num_trainers):
        chosen = _choose_ranks(vacancies, num_trainers - trainer, remainder, nodes, placement)
        for rank in chosen:
            vacancies[rank] -= 1
        ranks[trainer] = sorted([*range(len(nodes))] * everywhere + chosen)
    return Layout.one_rank_per_worker(ranks)


def _by_node(nodes: Sequence[int]) -> dict[int, list[int]]:
    """The ranks of every node."""
    return {node: [rank for rank, other in enumerate(nodes) if other == node] for node in sorted(set(nodes))}


def _vacancies(num_trainers: int, width: int, nodes: Sequence[int], placement: Placement) -> list[int]:
    """How many of the `num_trainers * width` workers each rank takes: all the same, or one more.

    For `pack` the extra workers go to nodes in multiples that fill whole trainers; for `spread` one by one.
    """
    base, extras = divmod(num_trainers * width, len(nodes))
    vacancies = [base] * len(nodes)
    while extras:
        for ranks in _by_node(nodes).values():
            held = sum(vacancies[rank] for rank in ranks)
            portion = width - held % width if placement is Placement.pack else 1
            without = [rank for rank in ranks if vacancies[rank] == base]
            for rank in without[: min(portion, extras)]:
                vacancies[rank] += 1
                extras -= 1
    return vacancies


def _choose_ranks(
    vacancies: Sequence[int], trainers_left: int, width: int, nodes: Sequence[int], placement: Placement
) -> list[int]:
    """`width` distinct ranks for the next trainer, such that the trainers after it can still be placed.

    They can exactly when no rank has more vacancies than trainers are left (Gale-Ryser), so a rank with as many
    must be chosen now. The others follow the placement: `pack` uses up a node before it begins another, and what covers
    most of the rest goes first; `spread` takes the node with the fewest chosen. Fuller nodes and lower ranks go first.
    """
    chosen = [rank for rank, vacant in enumerate(vacancies) if vacant == trainers_left]
    num_chosen = Counter(nodes[rank] for rank in chosen)
    open_ranks: dict[int, list[tuple[int, int, int]]] = {}
    for node, ranks in _by_node(nodes).items():
        on_node = sum(vacancies[rank] for rank in ranks)
        vacant = [rank for rank in ranks if 0 < vacancies[rank] < trainers_left]
        open_ranks[node] = sorted((-on_node, -vacancies[rank], rank) for rank in vacant)

    def preference(node: int) -> tuple[object, ...]:
        first, covered = open_ranks[node][0], min(width - len(chosen), len(open_ranks[node]))
        if placement is Placement.pack:
            return num_chosen[node] == 0, -covered, first
        return num_chosen[node], first

    while len(chosen) < width:
        node = min((node for node in open_ranks if open_ranks[node]), key=preference)
        chosen.append(open_ranks[node].pop(0)[-1])
        num_chosen[node] += 1
    return chosen


def place_again(layout: Layout, nodes: Sequence[int], placement: Placement) -> Layout:
    """The same trainers and workers on other ranks, after merges too, when trainers differ in size.

    All workers in one line, trainer by trainer, are dealt to the ranks in turn: loads differ by at most one, and a
    trainer's workers stand on distinct ranks as long as there are enough, neighbours in the order of the deal.
    """
    order = list(range(len(nodes)))
    if placement is Placement.spread:  # the first rank of every node, then the second
        order.sort(key=lambda rank: (nodes[:rank].count(nodes[rank]), rank))
    turns = cycle(order)
    return Layout.one_rank_per_worker(
        {trainer: [next(turns) for _ in layout.workers[trainer]] for trainer in layout.trainers}
    )


def fitted(
    layout: Layout, num_ranks: int, held_by: Callable[[int, int], Collection[int]]
) -> tuple[Layout, dict[int, list[int | None]]]:
    """As many workers as ranks, or one of every trainer if these are more; ranks keep the workers whose state they hold
    as far as that goes.

    Args:
        held_by: the ranks that hold the state of a worker of a trainer.

    Returns:
        The layout, and by trainer, which worker each was before; None: it is new.
    """
    count, more = divmod(max(num_ranks, len(layout.trainers)), len(layout.trainers))
    of_each = max(num_ranks, len(layout.trainers)) // num_ranks
    load, ranks = Counter({rank: 0 for rank in range(num_ranks)}), dict[int, list[int]]()
    origins: dict[int, list[int | None]] = {}
    for place_of_trainer, trainer in enumerate(layout.trainers):
        wanted = count + (place_of_trainer < more)
        origins[trainer] = [worker if worker < layout.num_workers(trainer) else None for worker in range(wanted)]
        ranks[trainer] = []
    for is_new in (False, True):
        for trainer, of_workers in origins.items():
            for origin in (one for one in of_workers if (one is None) == is_new):
                near = [rank for rank in (() if origin is None else held_by(trainer, origin)) if load[rank] < of_each]
                rank = min(near or load, key=lambda one: (load[one], one in ranks[trainer], one))
                load[rank] += 1
                ranks[trainer].append(rank)
    return Layout.one_rank_per_worker(ranks), origins


def check_ranks(settings: Settings, num_ranks: int, is_all: bool = True) -> None:
    """Refuse ranks and workers that do not fit together, by a SettingsError; unless `is_all`, there are more ranks."""
    pool, num_seats = settings.pool, num_ranks // settings.pool.ranks_per_worker
    workers = _workers_per_trainer(settings, num_seats)
    if pool.trainers * workers < num_seats:
        ranks = f"{num_ranks} ranks" if num_seats == num_ranks else f"{num_seats} x {pool.ranks_per_worker} ranks"
        raise SettingsError(
            f"pool.trainers={pool.trainers}, pool.workers_per_trainer={workers}: {pool.trainers * workers} "
            f"workers leave some of {ranks} idle; start fewer ranks, or raise either"
        )
    is_suitable = not (is_all and settings.algorithm.is_data_parallel) or workers == num_ranks
    rule = f"algorithm=ddp has one worker per rank, and there are {num_ranks} ranks; set it to null, or to their number"
    require(is_suitable, "pool.workers_per_trainer", workers, rule)


def experiment_layout(settings: Settings, nodes: Sequence[int]) -> Layout:
    """The layout that a run starts with; raises a SettingsError where ranks and workers do not fit together."""
    pool = settings.pool
    seats = seat_nodes(nodes, pool.ranks_per_worker)
    check_ranks(settings, len(nodes))
    return place(pool.trainers, _workers_per_trainer(settings, len(seats)), seats, pool.placement)


def ranks_of_seat(seat: int, ranks_per_seat: int) -> range:
    """The neighbouring ranks that are a seat."""
    return range(ranks_per_seat * seat, ranks_per_seat * (seat + 1))


def seat_nodes(nodes: Sequence[int], ranks_per_worker: int) -> Sequence[int]:
    """The node of every seat; raises a SettingsError where ranks cannot be divided into such seats."""
    setting, size = "pool.ranks_per_worker", ranks_per_worker
    rule = f"{len(nodes)} ranks are no multiple of it; start {-(-len(nodes) // size) * size}, or set another"
    require(len(nodes) % size == 0, setting, size, rule)
    for first in range(0, len(nodes), size):
        on = Counter(nodes[first : first + size])
        rule = f"ranks {first} to {first + size - 1} stand on nodes {', '.join(map(str, sorted(on)))}"
        remedy = f"a worker's ranks must stand on one node; start a multiple of {size} ranks on each"
        require(len(on) == 1, setting, size, f"{rule}; {remedy}, or set at most {min(on.values())}")
    return nodes[::size]


def _workers_per_trainer(settings: Settings, num_ranks: int) -> int:
    return settings.pool.workers_per_trainer or max(1, num_ranks // settings.pool.trainers)
