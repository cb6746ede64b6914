"""When trainers merge, which, and what becomes of their workers (AdLoCo, Algorithms CHECK_MERGE and DO_MERGE)."""

from dataclasses import dataclass
from typing import Annotated

from adloco_dist.config.choices import MergePolicy, MergeWeights, ReleasedWorkers
from adloco_dist.config.errors import SettingsError
from adloco_dist.config.read_when import SEVERAL_TRAINERS, ReadWhen

MERGES = ReadWhen(SEVERAL_TRAINERS, "merge.policy!=none", "batching.request!=replay")
"""Trainers merge, and not as a recorded run has it."""
OF_REPLAY = ReadWhen(SEVERAL_TRAINERS, "batching.request=replay")


@dataclass
class MergeSettings:
    """How the pool shrinks."""

    policy: Annotated[MergePolicy, ReadWhen(SEVERAL_TRAINERS, "batching.request!=replay")] = (
        MergePolicy.worst_with_worst
    )
    """worst_with_worst: the trainers with the smallest requests. best_with_worst: the one with the largest request
    takes in those with the smallest. worst_loss_with_best: the one with the smallest loss takes in those with the
    largest; validation losses decide where the last round ended with an evaluation. none: trainers never merge."""
    every_rounds: Annotated[int, MERGES] = 5
    """Rounds between two times at which trainers merge."""
    width: Annotated[int, MERGES] = 2
    """w: trainers that become one; fewer where `min_trainers` asks for it."""
    simultaneous: Annotated[int, MERGES] = 1
    """Merges of separate trainers at one time."""
    min_trainers: Annotated[int, MERGES] = 1
    """Minimum number of trainers that are left."""
    weights: Annotated[MergeWeights, MERGES] = MergeWeights.request
    """What a trainer's anchor and outer momentum count for in the average: its bounded request, or all the same."""
    radial: Annotated[bool, MERGES, OF_REPLAY] = False
    """Whether the average of the anchors is taken of directions and of norms, as with outer.radial; that of momenta is
    a plain one."""
    released_workers: Annotated[ReleasedWorkers, MERGES] = ReleasedWorkers.join
    """Workers of a trainer that ended. join: they work for the survivor, where they are. retire: they end and free
    their memory. redistribute: all workers are dealt again in proportion to requests, at least one each."""

    def __post_init__(self) -> None:
        if self.every_rounds < 1:
            raise SettingsError.of("merge.every_rounds", self.every_rounds, "must be >= 1")
        if self.width < 2:
            raise SettingsError.of("merge.width", self.width, "must be >= 2: a merge takes two trainers or more")
        if self.simultaneous < 1:
            raise SettingsError.of("merge.simultaneous", self.simultaneous, "must be >= 1")
        if self.min_trainers < 1:
            raise SettingsError.of("merge.min_trainers", self.min_trainers, "must be >= 1")
