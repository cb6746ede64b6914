"""Who works for whom after merges, and what must be sent for it (design, section 3.4)."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco_dist.config import FreedWorkers
from adloco_dist.decisions.layout import Layout
from adloco_dist.decisions.merging import Merge

Origin = tuple[int, int]
"""A worker before a regrouping: its trainer and its id there."""

Origins = Mapping[int, tuple[Origin, ...]]
"""Of every trainer whose workers change: where each comes from, in the order of the new ids."""


@dataclass(frozen=True)
class Regrouping:
    """What changes in the pool before a round."""

    merges: tuple[Merge, ...]
    origins: Origins

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "Regrouping":
        return cls(tuple(map(Merge.from_message, message["merges"])), origins_from_message(message["origins"]))

    @property
    def ended(self) -> set[int]:
        """The trainers that are no more."""
        return {trainer for merge in self.merges for trainer in merge.ended}

    def fits(self, layout: Layout) -> bool:
        """Whether the pool of this layout has the trainers and workers that it names, each of them once."""
        members = [member for merge in self.merges for member in merge.shares]
        workers = [worker for origins in self.origins.values() for worker in origins]
        survivors = {merge.survivor for merge in self.merges}
        return (
            len(members) == len(set(members))
            and len(workers) == len(set(workers))
            and set(members) <= set(layout.hosts)
            and survivors <= set(self.origins) <= set(layout.hosts) - self.ended
            and all(self.origins.values())
            and all(
                trainer in layout.hosts and 0 <= worker < layout.num_workers(trainer) for trainer, worker in workers
            )
        )

    def layout_after(self, layout: Layout) -> Layout:
        """What it makes of `layout`: every worker is hosted where it was."""
        ended = self.ended
        kept = {trainer: hosts for trainer, hosts in layout.hosts.items() if trainer not in ended}
        moved = {
            id: tuple(layout.hosts[trainer][worker] for trainer, worker in workers)
            for id, workers in self.origins.items()
        }
        return Layout(kept | moved)

    def ranks(self, before: Layout) -> set[int]:
        """Those that host a trainer of which something changes, before or after: they probe their memory again."""
        touched = {trainer for workers in self.origins.values() for trainer, _ in workers}
        touched |= {member for merge in self.merges for member in merge.shares}
        return {rank for trainer in touched for rank in before.hosts[trainer]}


def origins_from_message(message: Mapping[str, Any]) -> Origins:
    """Origins after JSON, which has neither tuples nor integer keys."""
    return {int(id): tuple((trainer, worker) for trainer, worker in workers) for id, workers in message.items()}


def assign_workers(
    layout: Layout,
    merges: Sequence[Merge],
    freed: FreedWorkers,
    requests: Mapping[int, float],
    shard_sequences: Mapping[int, int],
) -> Origins:
    """Find work for the workers of the trainers that end.

    Never looks at ranks, and workers stay where they are hosted: the same run comes of any layout.

    Args:
        requests: of redistribute: what the remaining trainers' numbers of workers are in proportion to.
        shard_sequences: after the merges; no trainer is dealt more workers than its shard has sequences.
    """
    origins = {id: [(id, worker) for worker in range(layout.num_workers(id))] for id in layout.trainers}
    ended = {trainer: origins.pop(trainer) for merge in merges for trainer in merge.ended}
    changed = {merge.survivor for merge in merges}
    match freed:
        case FreedWorkers.retire:
            pass
        case FreedWorkers.join:
            for merge in merges:
                for trainer in merge.ended:
                    origins[merge.survivor] += ended[trainer]
        case FreedWorkers.redistribute:
            changed = set(origins)
            num_workers = sum(map(len, [*origins.values(), *ended.values()]))
            counts = _in_proportion(num_workers, {id: requests[id] for id in origins}, shard_sequences)
            spare = [worker for id in origins for worker in origins[id][counts[id] :]]
            spare = sorted([*spare, *(worker for workers in ended.values() for worker in workers)])
            for id, count in counts.items():
                kept = origins[id][:count]
                wanted = count - len(kept)
                origins[id], spare = kept + spare[:wanted], spare[wanted:]
    return {id: tuple(origins[id]) for id in sorted(changed)}


def _in_proportion(total: int, weights: Mapping[int, float], most: Mapping[int, int]) -> dict[int, int]:
    """`total` seats in proportion to weights, at least one each and at most `most` (D'Hondt; ties: lower id)."""
    counts = dict.fromkeys(sorted(weights), 1)
    queue = [(-weights[id] / 2, id) for id in counts]
    heapq.heapify(queue)
    for _ in range(total - len(counts)):
        while counts[queue[0][1]] >= most.get(queue[0][1], total):
            heapq.heappop(queue)
        id = queue[0][1]
        counts[id] += 1
        heapq.heapreplace(queue, (-weights[id] / (counts[id] + 1), id))
    return counts


@dataclass(frozen=True)
class Transfer:
    """How a trainer's state comes about after a regrouping: a weighted sum over members, wanted on `ranks`."""

    trainer: int
    shares: Mapping[int, float]
    """Of the members that contribute, ascending."""
    holders: Mapping[int, tuple[int, ...]]
    """The ranks among `ranks` that hold each of them."""
    ranks: tuple[int, ...]
    """Those that need the result, and where none of them holds a member its lowest rank; ascending."""

    def sent(self, sender: int, receiver: int) -> list[int]:
        """The members that `sender` brings to `receiver`, which holds none of them; its holders take turns."""
        place = self.ranks.index(receiver)
        return [
            member
            for member, holders in self.holders.items()
            if receiver not in holders and holders[place % len(holders)] == sender
        ]


def transfer(trainer: int, shares: Mapping[int, float], layout: Layout, needed: tuple[int, ...]) -> Transfer:
    """Bring a weighted sum over trainers of `layout` to the ranks in `needed`.

    Args:
        shares: by member; those without a share are left out.
    """
    hosts = {member: layout.ranks(member) for member in sorted(shares) if shares[member]}
    far = [ranks[0] for ranks in hosts.values() if not set(ranks) & set(needed)]
    everyone = tuple(sorted({*needed, *far}))
    holders = {member: tuple(rank for rank in ranks if rank in everyone) for member, ranks in hosts.items()}
    return Transfer(trainer, {member: shares[member] for member in hosts}, holders, everyone)


def transfers(before: Layout, after: Layout, regrouping: Regrouping) -> list[Transfer]:
    """What a regrouping needs, in the one order in which all ranks do it.

    A trainer that did not merge is sent only where it was not yet.
    """
    shares = {merge.survivor: merge.shares for merge in regrouping.merges}
    return [
        transfer(trainer, shares.get(trainer, {trainer: 1.0}), before, after.ranks(trainer))
        for trainer in sorted(regrouping.origins)
        if trainer in shares or not set(after.ranks(trainer)) <= set(before.ranks(trainer))
    ]
