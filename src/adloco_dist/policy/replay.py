"""The batches and merges of another run, repeated round by round: open loop, to read off what the batch alone does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from adloco_dist.config import Settings, require
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge


@dataclass(frozen=True)
class Trajectory:
    """What is repeated; rounds count from 0."""

    batches: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Total batches, by round and trainer."""
    merges: Mapping[int, Merge] = field(default_factory=dict)
    """Merges, by the round before which they happen."""


def check_trajectory(settings: Settings, layout: Layout, trajectory: Trajectory) -> None:
    """Refuse a replay that does not say the batch of every trainer in every round of the run, by a SettingsError."""
    setting, run, budget = "batching.replay", settings.batching.replay, settings.budget_amount
    trainers = sorted(trajectory.batches.get(0, {}))
    rule = f"the run has {len(layout.trainers)}; set pool.trainers to the same number"
    require(trainers == layout.trainers, setting, run, f"holds trainers {', '.join(map(str, trainers))}, {rule}")
    for round_, batches in sorted(trajectory.batches.items()):
        if merge := trajectory.merges.get(round_):
            rule = "is not of this pool; set pool.workers_per_trainer as it was, or name another run"
            is_possible = round_ > 0 and {merge.survivor} <= merge.shares.keys() <= layout.workers.keys()
            require(is_possible, setting, run, f"its merge before round {round_ + 1} {rule}")
            layout = merge.layout_after(layout)
        rule = f"has other trainers in round {round_ + 1} than its merges leave; name another"
        require(layout.trainers == sorted(batches), setting, run, rule)
    num_rounds = len(trajectory.batches)
    sequences_per_update = sum(sum(batches.values()) for batches in trajectory.batches.values())
    held_tokens = sequences_per_update * settings.algorithm.updates_per_round * settings.data.sequence_length
    is_long_enough = budget.unit != "rounds" or num_rounds >= budget.number
    require(is_long_enough, setting, run, f"holds {num_rounds} rounds, budget={budget} asks for more; lower it")
    rule = f"its {num_rounds} rounds give {held_tokens} tokens, budget={budget} asks for more; lower it"
    require(budget.unit != "tokens" or held_tokens >= budget.number, setting, run, rule)
