"""Where a run goes on that has lost ranks in the middle of a round: plain values, decided alike on all who are left."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from adloco_dist.config import Placement
from adloco_dist.policy.layout import Layout, place_again
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.report import MergeReport


@dataclass(frozen=True)
class Share:
    """What a rank is left with of a trainer."""

    steps: int
    """Outer steps that it has taken since the ranks met."""
    checksum: Sequence[int]
    """Of the anchor."""
    workers: Sequence[int]


@dataclass(frozen=True)
class Remains:
    """What a rank is left with, by trainer; without trainers where it has just begun."""

    generation: int = -1
    """Of the ranks among whom others were lost."""
    round: int = 0
    next_event: int = 0
    """Where it stands, as in `Standing`."""
    trainers: Mapping[int, Share] = field(default_factory=dict)
    merge: MergeReport = field(default_factory=MergeReport)
    found: PoolReport | None = None
    seconds: float = 0.0
    has_records: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.round, self.next_event


@dataclass(frozen=True)
class Recovery:
    """What ranks that are left do; ranks are those of the new generation."""

    remains: Mapping[int, Remains]
    """Of the ranks of the generation that is followed."""
    furthest: int
    """The rank whose plan is followed, and whose place in it."""
    ranks_per_seat: int

    @classmethod
    def of(cls, remains: Sequence[Remains], ranks_per_seat: int) -> "Recovery | None":
        """By what every rank is left with; None: nothing is left."""
        newest = max(one.generation for one in remains)
        left = {rank: one for rank, one in enumerate(remains) if one.generation == newest and one.trainers}
        if not left:
            return None
        return cls(left, max(left, key=lambda rank: (left[rank].place, -rank)), ranks_per_seat)

    def following(self, plan: RoundPlan) -> "Recovery":
        """The same, where the plan of the rank that has come furthest is followed: after a merge before its round, what
        others are left with of the round before is of no use."""
        if plan.merge is None:
            return self
        is_of_it = {rank: one.round == plan.round for rank, one in self.remains.items()}
        known = {rank: one if is_of_it[rank] else replace(one, trainers={}) for rank, one in self.remains.items()}
        return replace(self, remains=known)

    def leaders(self, trainer: int) -> tuple[int, ...]:
        """The ranks whose parts of a trainer's anchor the others follow, by shard; none where a part is lost."""
        ranks = [
            max(held, key=lambda rank: (self.remains[rank].trainers[trainer].steps, self.remains[rank].place, -rank))
            for shard in range(self.ranks_per_seat)
            if (held := [rank for rank in self.holders(trainer) if rank % self.ranks_per_seat == shard])
        ]
        return tuple(ranks) if len(ranks) == self.ranks_per_seat else ()

    def holders(self, trainer: int) -> list[int]:
        """The ranks that have the trainer's anchor, ascending."""
        return [rank for rank, one in self.remains.items() if trainer in one.trainers]

    def behind(self, trainer: int) -> list[tuple[int, int]]:
        """The ranks that have another anchor of a trainer than the one that is followed, each after whom it follows."""
        pairs = []
        for rank in self.holders(trainer):
            leader = self.leaders(trainer)[rank % self.ranks_per_seat]
            own, followed = self.remains[rank].trainers[trainer], self.remains[leader].trainers[trainer]
            if (own.steps, list(own.checksum)) != (followed.steps, list(followed.checksum)):
                pairs.append((leader, rank))
        return pairs

    def trainers(self, plan: RoundPlan) -> list[int]:
        """The trainers of the plan of which an anchor is left."""
        return [trainer for trainer in plan.layout.trainers if self.leaders(trainer)]

    def seat_of(self, trainer: int, worker: int) -> int | None:
        """The seat that has a worker's state; None: it is lost."""
        for rank, one in self.remains.items():
            if trainer in one.trainers and worker in one.trainers[trainer].workers:
                return rank // self.ranks_per_seat
        return None

    def lost(self, plan: RoundPlan, trainer: int) -> list[int]:
        """The workers of a trainer whose state is lost."""
        return [worker for worker in range(plan.layout.num_workers(trainer)) if self.seat_of(trainer, worker) is None]

    def held(self, plan: RoundPlan) -> Layout:
        """Who writes every worker's state: who has it, or of one that is lost, who is followed."""
        return Layout.one_rank_per_worker(
            {
                trainer: [
                    self.leaders(trainer)[0] // self.ranks_per_seat if seat is None else seat
                    for worker in range(plan.layout.num_workers(trainer))
                    for seat in [self.seat_of(trainer, worker)]
                ]
                for trainer in self.trainers(plan)
            }
        )

    def layout(self, plan: RoundPlan, nodes: Sequence[int], placement: Placement) -> Layout:
        """Where workers are from now on: where they were, and those that are lost where there is most room; all are
        placed again where a seat would have none. `nodes` is the node of every seat."""
        load = Counter({seat: 0 for seat in range(len(nodes))})
        seats: dict[int, list[int | None]] = {}
        for trainer in self.trainers(plan):
            workers = range(plan.layout.num_workers(trainer))
            seats[trainer] = [self.seat_of(trainer, worker) for worker in workers]
            load.update(seat for seat in seats[trainer] if seat is not None)
        placed: dict[int, list[int]] = {}
        for trainer, of_workers in seats.items():
            placed[trainer] = []
            for seat in of_workers:
                if seat is None:
                    seat = min(load, key=lambda other: (load[other], other in of_workers, other))
                    load[seat] += 1
                placed[trainer].append(seat)
        layout = Layout.one_rank_per_worker(placed)
        return layout if min(load.values()) else place_again(layout, nodes, placement)


def without_lost(plan: RoundPlan, layout: Layout, leaving: Mapping[int, Sequence[int]]) -> RoundPlan:
    """A plan for the trainers of another layout, of which none are new, and some workers end with the round."""

    def left(by_trainer: Mapping[int, object]) -> dict[int, object]:
        return {trainer: value for trainer, value in by_trainer.items() if trainer in layout.workers}

    names = ("batches", "shard_sequences", "nonfinite_rounds", "worker_updates", "owed_updates")
    ending = {
        trainer: tuple(sorted({*plan.leaving.get(trainer, ()), *workers}))
        for trainer in layout.trainers
        if (workers := leaving.get(trainer, ())) or trainer in plan.leaving
    }
    return replace(plan, layout=layout, leaving=ending, **{name: left(getattr(plan, name)) for name in names})
