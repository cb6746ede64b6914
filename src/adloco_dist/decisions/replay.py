"""The batches of another run, repeated round by round: open loop, and free to read off what the batch alone does."""

from collections.abc import Mapping, Sequence

from adloco_dist.config import Settings, SettingsError
from adloco_dist.decisions.layout import Layout

Trajectory = Mapping[int, Sequence[int]]
"""Total batch of every trainer in every round."""


def check_trajectory(settings: Settings, layout: Layout, trajectory: Trajectory) -> None:
    """A replay must say the batch of every trainer in every round of the run.

    Raises:
        SettingsError: other trainers, or fewer rounds than the run takes.
    """
    told = f"batching.replay={settings.batching.replay}"
    if sorted(trajectory) != layout.trainers:
        held = ", ".join(map(str, sorted(trajectory)))
        raise SettingsError(
            f"{told}: holds trainers {held}, the run has {len(layout.trainers)}; set pool.trainers to the same number"
        )
    num_rounds = min(len(batches) for batches in trajectory.values())
    rounds, tokens = settings.budget.rounds, settings.budget.tokens
    if rounds is not None and num_rounds < rounds:
        raise SettingsError(f"{told}: holds {num_rounds} rounds, budget.rounds={rounds} asks for more; lower it")
    sequences_per_update = sum(sum(batches[:num_rounds]) for batches in trajectory.values())
    held_tokens = sequences_per_update * settings.algorithm.updates_per_round * settings.data.sequence_length
    if tokens is not None and held_tokens < tokens:
        raise SettingsError(
            f"{told}: its {num_rounds} rounds give {held_tokens} tokens, budget.tokens={tokens} asks for more; lower it"
        )
