"""Which rank hosts which workers: plain integers (design: Layout)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adloco_dist.config import Algorithm, Placement, Settings, SettingsError


@dataclass(frozen=True)
class Layout:
    """`hosts[i][m]` is the rank that hosts worker m of trainer i; worker ids rise with ranks."""

    hosts: Mapping[int, tuple[int, ...]]

    @property
    def trainers(self) -> list[int]:
        """Ids of the living trainers, ascending: the one order in which collectives are issued."""
        return sorted(self.hosts)

    def num_workers(self, trainer: int) -> int:
        return len(self.hosts[trainer])

    def ranks(self, trainer: int) -> tuple[int, ...]:
        """The distinct ranks of a trainer, ascending."""
        return tuple(sorted(set(self.hosts[trainer])))

    def workers_on(self, rank: int, trainer: int) -> list[int]:
        return [worker for worker, host in enumerate(self.hosts[trainer]) if host == rank]

    def trainers_on(self, rank: int) -> list[int]:
        return [trainer for trainer in self.trainers if rank in self.hosts[trainer]]

    def num_nodes(self, trainer: int, nodes: Sequence[int]) -> int:
        return len({nodes[rank] for rank in self.hosts[trainer]})


def place(num_trainers: int, workers_per_trainer: int, nodes: Sequence[int], placement: Placement) -> Layout:
    """Host `num_trainers` x `workers_per_trainer` workers on the ranks.

    Loads differ by at most one; a trainer's workers stand on distinct ranks as long as there are enough, and
    evenly over all ranks otherwise. Within that, `pack` uses few nodes for a trainer and `spread` many.

    Args:
        nodes: the node of each rank, one entry per rank.
    """
    num_ranks = len(nodes)
    everywhere, remainder = divmod(workers_per_trainer, num_ranks)
    vacancies = _vacancies(num_trainers, remainder, nodes, placement)
    hosts: dict[int, tuple[int, ...]] = {}
    for trainer in range(num_trainers):
        chosen = _choose_ranks(vacancies, num_trainers - trainer, remainder, nodes, placement)
        for rank in chosen:
            vacancies[rank] -= 1
        hosts[trainer] = tuple(sorted([*range(num_ranks)] * everywhere + chosen))
    return Layout(hosts)


def _vacancies(num_trainers: int, width: int, nodes: Sequence[int], placement: Placement) -> list[int]:
    """How many of the `num_trainers * width` workers each rank takes: all the same, or one more.

    For `pack` the extra workers go to nodes in multiples that fill whole trainers; for `spread` one by one.
    """
    base, extras = divmod(num_trainers * width, len(nodes))
    vacancies = [base] * len(nodes)
    free = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in sorted(set(nodes))}
    while extras:
        for node, ranks in free.items():
            held = sum(vacancies[rank] for rank, other in enumerate(nodes) if other == node)
            portion = width - held % width if placement is Placement.pack else 1
            for _ in range(min(portion, extras, len(ranks))):
                vacancies[ranks.pop(0)] += 1
                extras -= 1
    return vacancies


def _choose_ranks(
    vacancies: Sequence[int], trainers_left: int, width: int, nodes: Sequence[int], placement: Placement
) -> list[int]:
    """`width` distinct ranks for the next trainer, such that the trainers after it can still be placed.

    They can exactly when no rank has more vacancies than trainers are left (Gale-Ryser), so a rank with as many
    must be chosen now; the others follow the placement, fuller nodes and lower ranks first.
    """
    chosen = [rank for rank, vacant in enumerate(vacancies) if vacant == trainers_left]
    vacant_on: Counter[int] = Counter()
    for node, vacant in zip(nodes, vacancies, strict=True):
        vacant_on[node] += vacant
    while len(chosen) < width:
        open_ranks = [rank for rank, vacant in enumerate(vacancies) if vacant and rank not in chosen]
        used = Counter(nodes[rank] for rank in chosen)
        offered = Counter(nodes[rank] for rank in open_ranks)
        wanted = width - len(chosen)
        keys = {}
        for rank in open_ranks:
            node = nodes[rank]
            fullest_first = (-vacant_on[node], -vacancies[rank], rank)
            if placement is Placement.pack:
                keys[rank] = (-min(used[node], 1), -min(wanted, offered[node]), *fullest_first)
            else:
                keys[rank] = (used[node], *fullest_first)
        chosen.append(min(open_ranks, key=keys.__getitem__))
    return chosen


def experiment_layout(settings: Settings, nodes: Sequence[int]) -> Layout:
    """The layout that a run starts with.

    Raises:
        SettingsError: when the ranks and workers do not fit together.
    """
    pool, num_ranks = settings.pool, len(nodes)
    workers = pool.workers_per_trainer or max(1, num_ranks // pool.trainers)
    if pool.trainers * workers < num_ranks:
        raise SettingsError(
            f"pool.trainers={pool.trainers}, pool.workers_per_trainer={workers}: {pool.trainers * workers} "
            f"workers leave some of {num_ranks} ranks idle; start fewer ranks, or raise either"
        )
    if settings.algorithm.name is Algorithm.ddp and workers != num_ranks:
        raise SettingsError(
            f"pool.workers_per_trainer={workers}: algorithm=ddp has one worker per rank, and there are {num_ranks} "
            "ranks; set it to null, or to the number of ranks"
        )
    return place(pool.trainers, workers, nodes, pool.placement)
