"""What a rank holds of the pool, which regrouping changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import MergePolicy, Settings
from adloco_dist.data.protocols import Cursor, Splits
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.batch import max_local_batch
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.report import MergeReport, smallest_capacity
from adloco_dist.pool.capacity import probe_capacity
from adloco_dist.pool.estimator import GradientEstimator
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.offload import Offload
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker


@dataclass
class Standing:
    """Where this rank stands in a round that has begun."""

    plan: RoundPlan
    next_event: int
    """The event of the plan at which it goes on; as many as there are: with the end of the round; one more: with its
    evaluation."""
    merge: MergeReport
    """What the merges before the round came to here."""
    cursors: Mapping[int, Any]
    """Where every trainer's data stood as the round began."""
    found: PoolReport | None = None
    """What the next plan is decided from, on rank 0, once an error has ended the round."""
    seconds: float = 0.0
    """Time since the first round began, as it was then."""


@dataclass
class LocalPool:
    """What this rank works with."""

    settings: Settings
    runtime: Runtime
    splits: Splits
    objective: Objective
    groups: Groups
    slots: list[ComputeSlot]
    offload: Offload
    cursors: dict[int, Cursor]
    """Cursors of all trainers, wherever these are placed: every rank can take any of them over."""
    trainers: dict[int, Trainer]
    """Trainers with a worker on this rank, by id, ascending."""
    is_concurrent: bool = False
    """Whether the instances of a rank have their turns at once; the same on all ranks."""
    standing: Standing | None = None
    """None: in no round yet, or trainers are being merged."""

    def __post_init__(self) -> None:
        self.estimator = GradientEstimator() if self.settings.batching.measures_gradients else None
        """Watches the trainers' gradients; None where batches do not follow them."""

    def stand(self, plan: RoundPlan, next_event: int, merge: MergeReport) -> Standing:
        """Note that this rank stands in a round, before an event of it, and after what `merge` reports."""
        cursors = {trainer: cursor.state_dict() for trainer, cursor in self.cursors.items()}
        self.standing = Standing(plan, next_event, merge, cursors)
        return self.standing

    def leave(self, leaving: Mapping[int, Sequence[int]]) -> None:
        """Do without some workers, by trainer; those after them take their numbers."""
        for trainer_id, numbers in leaving.items():
            if trainer := self.trainers.get(trainer_id):
                trainer.workers = [worker for worker in trainer.workers if worker.id not in numbers]
                for worker in trainer.workers:
                    worker.id -= sum(number < worker.id for number in numbers)
                if not trainer.workers:
                    del self.trainers[trainer_id]
        self.offload.settle(self.workers)

    @property
    def flat_model(self) -> FlatModel:
        """The first slot's flat model: also the scratch and the payload of everything between the inner phases."""
        return self.slots[0].flat_model

    @property
    def capacity(self) -> int | None:
        """Sequences per micro-batch of the slot that takes the fewest; None: any number."""
        return smallest_capacity(slot.flat_model.capacity for slot in self.slots)

    @property
    def workers(self) -> list[Worker]:
        return [worker for trainer in self.trainers.values() for worker in trainer.workers]


def bytes_reserved_for_groups(settings: Settings, groups: Groups, layout: Layout, rank: int) -> int:
    """GPU memory for the groups that merges may yet bring this rank."""
    merges = settings.merge.policy is not MergePolicy.none
    return groups.bytes_to_come(rank, len(layout.trainers)) if merges else 0


def probe_in_turn(pool: LocalPool, layout: Layout, takes_part: bool = True) -> bool:
    """Call `_probe` on this rank; ranks that share a GPU take turns, for each measures its free memory. Collective."""
    runtime, fits = pool.runtime, True
    # Ranks that hold a worker together try it together; their memory is counted.
    turn_of_rank, num_turns = (0, 1) if runtime.ranks_per_worker > 1 else (runtime.turn, runtime.num_turns)
    for turn in range(num_turns):
        if takes_part and turn == turn_of_rank:
            fits = _probe(pool, layout)
        if num_turns > 1:
            runtime.control.exchange({})
    return fits


def _probe(pool: LocalPool, layout: Layout) -> bool:
    """Find this rank's capacity; false if not even one sequence fits, though the capacity is one then."""
    if not pool.trainers:
        return True
    settings, trainers = pool.settings, list(pool.trainers.values())
    maximum = max(
        max_local_batch(settings.batching, layout.num_workers(trainer.id), trainer.cursor.size) for trainer in trainers
    )
    reserved_bytes = bytes_reserved_for_groups(settings, pool.groups, layout, pool.runtime.seat)
    capacity = probe_capacity(pool.slots, trainers, settings, maximum, pool.runtime.ranks_on_device, reserved_bytes)
    for slot in pool.slots:
        slot.flat_model.capacity = None if capacity is None else max(1, capacity)
    return capacity is None or capacity >= 1
