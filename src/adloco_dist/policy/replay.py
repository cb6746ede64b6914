"""The batches and merges of another run, repeated round by round: open loop, to read off what the batch alone does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from adloco_dist.config import Settings, SettingsError
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.merging import Merge


@dataclass(frozen=True)
class Trajectory:
    """What is repeated; rounds count from 0."""

    batches: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Total batches, by round and trainer."""
    merges: Mapping[int, Merge] = field(default_factory=dict)
    """Merges, by the round before which they happen."""

    def total_batch(self, trainer: int, round_: int) -> int | None:
        """Return the total batch of a trainer in a round; None where nothing was recorded."""
        return self.batches.get(round_, {}).get(trainer)


def check_trajectory(settings: Settings, layout: Layout, trajectory: Trajectory) -> None:
    """A replay must say the batch of every trainer in every round of the run.

    Raises:
        SettingsError: other trainers, fewer rounds than the run takes, or merges of another pool.
    """
    detail = f"batching.replay={settings.batching.replay}"
    trainers = sorted(trajectory.batches.get(0, {}))
    if trainers != layout.trainers:
        held = ", ".join(map(str, trainers))
        raise SettingsError(
            f"{detail}: holds trainers {held}, the run has {len(layout.trainers)}; set pool.trainers to the same number"
        )
    for round_, batches in sorted(trajectory.batches.items()):
        if merge := trajectory.merges.get(round_):
            rule = "is not of this pool; set pool.workers_per_trainer as it was, or name another run"
            if round_ == 0 or not merge.fits(layout):
                raise SettingsError(f"{detail}: its merge before round {round_ + 1} {rule}")
            layout = merge.layout_after(layout)
        if layout.trainers != sorted(batches):
            raise SettingsError(
                f"{detail}: has other trainers in round {round_ + 1} than its merges leave; name another"
            )
    num_rounds = len(trajectory.batches)
    budget = settings.budget_amount
    if budget.unit == "rounds" and num_rounds < budget.number:
        raise SettingsError(f"{detail}: holds {num_rounds} rounds, budget={budget} asks for more; lower it")
    sequences_per_update = sum(sum(batches.values()) for batches in trajectory.batches.values())
    held_tokens = sequences_per_update * settings.algorithm.updates_per_round * settings.data.sequence_length
    rule = f"its {num_rounds} rounds give {held_tokens} tokens, budget={budget} asks for more; lower it"
    if budget.unit == "tokens" and held_tokens < budget.number:
        raise SettingsError(f"{detail}: {rule}")
