"""What is kept of an outer step: the launcher's checkpoints and `DiLoCo.state_dict` are both made from it."""

from adloco_dist.averaging.outer_sgd import OuterSGD
from adloco_dist.schema import AWAITS, Entry, Kind


def outer_entries(optimizer: OuterSGD, keeps_residual: bool) -> list[Entry]:
    """What is kept of the outer step itself: attributes of an `OuterStep`."""
    return [
        Entry("anchor", Kind.vector, is_shared=True),
        *([Entry("momentum", Kind.vector, is_shared=True)] if optimizer.momentum else []),
        *([Entry("residual", Kind.packed)] if keeps_residual else []),
    ]


def replica_entries(is_delayed: bool) -> list[Entry]:
    """What is kept of each worker for it, with a fragment if updates are taken while that travels: attributes of a
    `Replica`."""
    return [
        *([Entry("departed", Kind.fragment, is_progress=True)] if is_delayed else []),
        Entry(AWAITS, Kind.equal, is_progress=True),
    ]
