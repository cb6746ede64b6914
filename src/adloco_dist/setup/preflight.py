"""What can be refused before a run exists, from its settings and what lies on this machine: training, or a dry run."""

from adloco_dist.config import Settings
from adloco_dist.data.splits import Splits
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.replay import Trajectory, check_trajectory
from adloco_dist.run.records import read_trajectory
from adloco_dist.setup.parts import Parts


def examine_data(settings: Settings, layout: Layout, parts: Parts) -> Splits:
    """The data of a run that begins.

    Raises:
        SettingsError: it cannot be read, or is too small for the pool.
    """
    splits = parts.splits(settings)
    splits.train.check_size(len(layout.trainers), layout.num_workers(0), settings.data.shards)
    return splits


def examine_replay(settings: Settings, layout: Layout | None) -> Trajectory:
    """The batches and merges that are to be replayed; none where nothing is.

    Args:
        layout: the layout of a run that begins; None: the run resumes.

    Raises:
        SettingsError: they cannot be read, or are of another pool.
    """
    if settings.batching.replay is None:
        return Trajectory()
    trajectory = read_trajectory("batching.replay", settings.batching.replay)
    if layout is not None:
        check_trajectory(settings, layout, trajectory)
    return trajectory
