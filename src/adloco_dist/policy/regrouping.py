"""Which trainers the workers belong to after merges, and what must be sent for it (docs/guide/merging.md)."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adloco_dist.config import ReleasedWorkers
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge

Origin = tuple[int, int]
"""A worker before a regrouping: its trainer and its id there."""

Origins = Mapping[int, tuple[Origin, ...]]
"""Origins of the workers, in the order of their new ids, for every trainer whose workers change."""


@dataclass(frozen=True)
class Regrouping:
    """What changes in the pool before a round."""

    merges: tuple[Merge, ...]
    origins: Origins

    @property
    def ended(self) -> set[int]:
        """The trainers that end in the merges."""
        return {trainer for merge in self.merges for trainer in merge.ended}

    def fits(self, layout: Layout) -> bool:
        """Whether the pool of this layout has the trainers and workers that it names, each of them once."""
        members = [member for merge in self.merges for member in merge.shares]
        workers = [worker for origins in self.origins.values() for worker in origins]
        survivors = {merge.survivor for merge in self.merges}
        return (
            len(members) == len(set(members))
            and len(workers) == len(set(workers))
            and set(members) <= set(layout.workers)
            and survivors <= set(self.origins) <= set(layout.workers) - self.ended
            and all(self.origins.values())
            and all(
                trainer in layout.workers and 0 <= worker < layout.num_workers(trainer) for trainer, worker in workers
            )
        )

    def layout_after(self, layout: Layout) -> Layout:
        """The layout after the merges: every worker stays on its ranks."""
        ended = self.ended
        kept = {trainer: workers for trainer, workers in layout.workers.items() if trainer not in ended}
        moved = {
            trainer: tuple(layout.workers[origin][worker] for origin, worker in origins)
            for trainer, origins in self.origins.items()
        }
        return Layout(kept | moved)

    def ranks(self, before: Layout) -> set[int]:
        """The ranks with a trainer that changes, before or after: they probe their memory again."""
        touched = {trainer for workers in self.origins.values() for trainer, _ in workers}
        touched |= {member for merge in self.merges for member in merge.shares}
        return {rank for trainer in touched for rank in before.ranks(trainer)}


def assign_workers(
    layout: Layout,
    merges: Sequence[Merge],
    released_workers: ReleasedWorkers,
    requests: Mapping[int, float],
    shard_sequences: Mapping[int, int],
) -> Origins:
    """Find work for the workers of the trainers that end.

    Never looks at ranks, and workers stay where they are: the run does not depend on the layout.

    Args:
        requests: what the remaining trainers' numbers of workers are in proportion to, for redistribute.
        shard_sequences: sizes of shards after the merges; no trainer gets more workers than its shard has sequences.
    """
    origins = {
        trainer: [(trainer, worker) for worker in range(layout.num_workers(trainer))] for trainer in layout.trainers
    }
    ended = {trainer: origins.pop(trainer) for merge in merges for trainer in merge.ended}
    changed = {merge.survivor for merge in merges}
    match released_workers:
        case ReleasedWorkers.retire:
            pass
        case ReleasedWorkers.join:
            for merge in merges:
                for trainer in merge.ended:
                    origins[merge.survivor] += ended[trainer]
        case ReleasedWorkers.redistribute:
            changed = set(origins)
            num_workers = sum(map(len, [*origins.values(), *ended.values()]))
            counts = _in_proportion(num_workers, {trainer: requests[trainer] for trainer in origins}, shard_sequences)
            spare = [worker for trainer in origins for worker in origins[trainer][counts[trainer] :]]
            spare = sorted([*spare, *(worker for workers in ended.values() for worker in workers)])
            for trainer, count in counts.items():
                kept = origins[trainer][:count]
                wanted = count - len(kept)
                origins[trainer], spare = kept + spare[:wanted], spare[wanted:]
    return {trainer: tuple(origins[trainer]) for trainer in sorted(changed)}


def _in_proportion(total: int, weights: Mapping[int, float], maximum: Mapping[int, int]) -> dict[int, int]:
    """`total` workers in proportion to weights, at least one each and at most `maximum` (D'Hondt; ties: lower id)."""
    counts = dict.fromkeys(sorted(weights), 1)
    queue = [(-weights[trainer] / 2, trainer) for trainer in counts]
    heapq.heapify(queue)
    for _ in range(total - len(counts)):
        while counts[queue[0][1]] >= maximum.get(queue[0][1], total):
            heapq.heappop(queue)
        trainer = queue[0][1]
        counts[trainer] += 1
        heapq.heapreplace(queue, (-weights[trainer] / (counts[trainer] + 1), trainer))
    return counts


@dataclass(frozen=True)
class Transfer:
    """How a trainer's state is formed after a regrouping: a weighted sum over members, needed on `ranks`."""

    trainer: int
    shares: Mapping[int, float]
    """Shares of the members that contribute, by member, ascending."""
    holders: Mapping[int, tuple[int, ...]]
    """The ranks among `ranks` that hold each of them."""
    ranks: tuple[int, ...]
    """The ranks that need the result, and the lowest rank of every member that none of them holds; ascending."""

    def sent(self, sender: int, receiver: int) -> list[int]:
        """The members that `sender` sends to `receiver`, which holds none of them; a member's holders alternate."""
        position = self.ranks.index(receiver)
        return [
            member
            for member, holders in self.holders.items()
            if receiver not in holders and holders[position % len(holders)] == sender
        ]


def transfer(trainer: int, shares: Mapping[int, float], layout: Layout, needed: tuple[int, ...]) -> Transfer:
    """Bring a weighted sum over trainers of `layout` to the ranks in `needed`.

    Args:
        shares: what each member counts for; those without a share are left out.
    """
    held_by = {member: layout.ranks(member) for member in sorted(shares) if shares[member]}
    far = [ranks[0] for ranks in held_by.values() if not set(ranks) & set(needed)]
    everyone = tuple(sorted({*needed, *far}))
    holders = {member: tuple(rank for rank in ranks if rank in everyone) for member, ranks in held_by.items()}
    return Transfer(trainer, {member: shares[member] for member in held_by}, holders, everyone)


def transfers(before: Layout, after: Layout, regrouping: Regrouping) -> list[Transfer]:
    """The transfers of a regrouping, in the one order in which all ranks perform them.

    A trainer that did not merge is sent only to ranks that did not hold it.
    """
    shares = {merge.survivor: merge.shares for merge in regrouping.merges}
    return [
        transfer(trainer, shares.get(trainer, {trainer: 1.0}), before, after.ranks(trainer))
        for trainer in sorted(regrouping.origins)
        if trainer in shares or not set(after.ranks(trainer)) <= set(before.ranks(trainer))
    ]
